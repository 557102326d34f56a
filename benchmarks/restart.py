"""Time until training continues after a kill: `python -m benchmarks.restart`.

A queue runs the tiny GPT on two ranks. The benchmark kills a rank, or the watcher of the job, or the
supervisor; in the last case it also cancels the job. Then it submits the run again. It measures the time from
the kill to the end of the next step, and how much of this time was before the submission.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.job_queue import kill_supervisor, open_own
from benchmarks.kill import command, write_data
from benchmarks.runner import save
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import Queue, new_token
from headwater.appliance.types import Job, Phase, Submission

_POLL_S = 0.02


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(_POLL_S)


def steps_done(model_dir: Path) -> int:
    """Return the number of steps that the runs in a model_dir have taken."""
    path = model_dir / "history.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def submit(queue: Queue, data: Path, model_dir: Path) -> Job:
    """Queue a run that takes all CSXs; it continues from its last checkpoint if it has one."""
    words = [*command(data, model_dir, "memory"), "--num_csx=2", "--max_steps=100000", "--eval_frequency=0"]
    submission = Submission(
        tuple(words), Path.cwd(), environment=dict(os.environ), num_csx=2, model_dir=model_dir
    )
    return queue.submit(submission, new_token())


def processes_of(model_dir: Path) -> list[psutil.Process]:
    """Return the processes whose command line names a model_dir, the oldest first."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if any(str(model_dir) in word for word in process.info["cmdline"] or [])
    ]
    return sorted(found, key=lambda process: process.info["create_time"])


def kill_rank(folder: QueueFolder, model_dir: Path) -> None:
    """Kill the last rank: the others end, and the job fails."""
    processes_of(model_dir)[-1].kill()


def kill_watcher(folder: QueueFolder, model_dir: Path) -> None:
    """Kill the watcher of the job: the processes of the job are ended, and the job fails."""
    parent = processes_of(model_dir)[0].parent()
    assert parent is not None
    parent.kill()


def kill_giver(folder: QueueFolder, model_dir: Path) -> None:
    """Kill the supervisor: the job continues, and cancelling it starts another supervisor."""
    kill_supervisor(folder)
    queue = open_own(folder)
    for job in queue.jobs():
        queue.cancel(job.name)


Kill = Callable[[QueueFolder, Path], None]
KILLS: dict[str, Kill] = {"rank": kill_rank, "watcher": kill_watcher, "supervisor": kill_giver}


def restart_s(folder: QueueFolder, data: Path, model_dir: Path, kill: Kill) -> tuple[float, float]:
    """Return seconds from a kill to the end of the job, and to the end of the first step of the next job."""
    queue = open_own(folder)
    job = submit(queue, data, model_dir)
    wait_until(lambda: any(model_dir.glob("checkpoint_*/manifest.json")))
    start = time.monotonic()
    kill(folder, model_dir)
    assert queue.wait(job.name).phase in (Phase.FAILED, Phase.CANCELLED)
    over_s = time.monotonic() - start
    before = steps_done(model_dir)
    again = submit(queue, data, model_dir)
    wait_until(lambda: steps_done(model_dir) > before)
    took_s = time.monotonic() - start
    queue.cancel(again.name)
    queue.wait(again.name)
    return over_s, took_s


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in KILLS}
    with tempfile.TemporaryDirectory(prefix="headwater-restart-") as place:
        data, folder = Path(place) / "data", QueueFolder(Path(place) / "queue")
        write_data(data)
        prepare(folder, num_csx=2, grace_s=60)
        for number in range(args.times):
            for name, kill in KILLS.items():
                seconds[name].append(restart_s(folder, data, Path(place) / f"{name}_{number}", kill))
                print(
                    name, "over after {:.1f} s, running after {:.1f} s".format(*seconds[name][-1]), flush=True
                )
        kill_supervisor(folder)
    medians = {name: statistics.median(took_s for _, took_s in times) for name, times in seconds.items()}
    print(save("restart", {"seconds": seconds, "medians": medians}))


if __name__ == "__main__":
    main()
