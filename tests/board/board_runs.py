"""Histories and files of runs, as runs write them."""

import dataclasses
import json
import math
import random
import shutil
import threading
import time

from headwater.board.app import make_app
from headwater.board.board import Board
from headwater.cli.board import listen
from headwater.trainer.callback import StepEnd, ValidateEnd
from headwater.trainer.facts import RunFacts
from headwater.trainer.run_dir import FACTS_FILE, RunDir

TOKEN = "a0token0of0the0tests"


def step_line(step, loss, **changes):
    """Return the line that `History` writes for a step."""
    rate = 1e-3 * min(1, step / 20)
    event = StepEnd(step, loss, rate, 1 + 1 / step, True, 1.0, 16384, 0.25, 3 << 20, 1 << 20, 0.75, 0.0)
    event = dataclasses.replace(event, memory_bytes=3 << 30, samples=8, busy_s={"compute": 0.2})
    return json.dumps({"kind": "train", **dataclasses.asdict(dataclasses.replace(event, **changes))}) + "\n"


def add_steps(run, first, last, offset=0.0):
    """Append steps to the history of a run."""
    with run.history.open("a") as file:
        for step in range(first, last + 1):
            file.write(step_line(step, 2 + 3 * math.exp(-step / 60) + offset))


def make_run(folder, name, steps, *, end_step=None, offset=0.0):
    """Write the files of a run and return its folder."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    facts = RunFacts(0, end_step or steps, 0.0, "cpu", memory_budget=4 << 30, memory_planned=7 << 29)
    (run.path / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(facts)))
    add_steps(run, 1, steps, offset)
    evaluation = ValidateEnd(steps, 0, 2.5 + offset, 4, metrics={"accuracy": 0.375})
    with run.history.open("a") as file:
        file.write(json.dumps({"kind": "validate", **dataclasses.asdict(evaluation)}) + "\n")
    return run


def made_up_sweep(folder, timeline):
    """Write six runs whose losses are made up, one of them with a spike, for pictures."""
    for place, width in enumerate((64, 96, 128, 192, 256, 384)):
        run, draw = RunDir(folder / "sweep" / f"width_{width}"), random.Random(width)
        run.path.mkdir(parents=True)
        steps = 20_000 if place else 14_500
        facts = RunFacts(0, 20_000, 0.0, "cpu", memory_budget=4 << 30, memory_planned=3 << 30)
        (run.path / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(facts)))
        with run.history.open("w") as file:
            for step in range(1, steps + 1, 5):
                loss = 2.6 - 0.12 * place + 5 * math.exp(-step / 1800) + draw.gauss(0, 0.05)
                spike = 3.0 * (place == 2 and 9000 < step < 9040)
                norm = 0.6 + math.exp(-step / 900) + abs(draw.gauss(0, 0.1)) + 4 * spike
                changes = {"gradient_norm": norm, "step_s": 0.2 + 0.06 * place + abs(draw.gauss(0, 0.01))}
                decay = 1e-3 * min(1, step / 800) * (1 - 0.9 * step / 20_000)
                memory = int((1.2 + 0.3 * place + draw.random() / 20) * 2**30)
                file.write(step_line(step, loss + spike, learning_rate=decay, memory_bytes=memory, **changes))
                if step % 2000 == 1 and step > 1:
                    found = ValidateEnd(step, 0, round(loss + 0.1, 4), 8, metrics={"accuracy": 0.4})
                    file.write(json.dumps({"kind": "validate", **dataclasses.asdict(found)}) + "\n")
    run = RunDir(folder / "sweep" / "width_128")
    run.profile.mkdir()
    shutil.copy(timeline, run.profile / "timeline.png")
    (run.path / "wsjob-000000000003.log").write_text(
        "continuing from step 8000: runs/sweep/width_128/checkpoint_8000\n"
        "step 19999/20000  loss 2.3587  51,204 tokens/s\nstep 20000/20000  loss 2.3321  51,198 tokens/s\n"
    )


def serve_board(stack, folder, jobs=None):
    """Serve a board in this process until `stack` is closed, and return its address.

    The server ends before the thread of the jobs: an open page asks for jobs as long as it is served.
    """
    import uvicorn

    if jobs is not None:
        stack.callback(jobs.close)
    board = stack.enter_context(Board(folder))
    listener = stack.enter_context(listen("127.0.0.1", 0))
    config = uvicorn.Config(make_app(board, jobs, TOKEN), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop():
        server.should_exit = True
        thread.join()

    stack.callback(stop)
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"
