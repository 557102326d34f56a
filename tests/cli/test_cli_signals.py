"""Interrupted and killed runs in separate processes."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from run_samples import assert_same_checkpoint, history, write_params

from headwater.trainer.checkpoint_inspection import complete_checkpoints

FAR = 1_000_000


@pytest.fixture
def start(tmp_path):
    """Start a command line in a separate process, which is killed after the test."""
    processes = []

    def run(*words):
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def start_in_terminal(tmp_path):
    """Start a command line whose output is a terminal; returns its process, and closes the terminal."""
    processes, terminals = [], []

    def run(*words):
        ours, theirs = pty.openpty()
        terminals.append(ours)
        # The process inherits this, also if the tests were started by `nohup`, which ignores the signal.
        # `preexec_fn` would do the same, but a process with it has no quick start.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "headwater", *map(str, words)],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGHUP, before)
        os.close(theirs)
        processes.append(process)
        closing = threading.Event()
        reader = threading.Thread(target=_read_until, args=(ours, closing))
        reader.start()

        def close():
            closing.set()
            reader.join()
            os.close(terminals.pop())

        return process, close

    yield run
    for process in processes:
        process.kill()
        process.wait()
    for terminal in terminals:
        os.close(terminal)


def _read_until(terminal, closing):
    """Read what a process writes to its terminal, which else gets full."""
    os.set_blocking(terminal, False)
    while not closing.is_set():
        try:
            os.read(terminal, 65536)
        except OSError:  # nothing to read yet, or the process has ended
            time.sleep(0.02)


def wait_until(condition, process):
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.communicate()}")
        time.sleep(0.02)


def steps_done(model_dir):
    path = model_dir / "history.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_prints_how_to_continue(start, headwater, data, tmp_path, number):
    params, run = write_params(tmp_path, data), tmp_path / "run"
    workers = "trainer.fit.train_dataloader.num_workers=1"
    process = start(
        "fit", params, "--max_steps", FAR, "--eval_frequency", 0, workers, "--checkpoint_steps", FAR
    )
    wait_until(lambda: steps_done(run) >= 3, process)
    # As a terminal does it, Ctrl-C goes to every process of the job, the data worker among them.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 130, err
    last = steps_done(run)
    assert "stopping after this step" in err
    assert "Traceback" not in err
    assert f"stopped after step {last}" in out
    assert f"to continue, run: headwater fit {run}" in out
    assert complete_checkpoints(run) == [run / f"checkpoint_{last}"]

    assert headwater("fit", run, "--max_steps", last + 2)[0] == 0
    undisturbed = write_params(tmp_path, data, "undisturbed")
    assert headwater("fit", undisturbed, "--max_steps", last + 2, "--eval_frequency", 0)[0] == 0
    assert history(run) == history(tmp_path / "undisturbed")
    name = f"checkpoint_{last + 2}"
    assert_same_checkpoint(run / name, tmp_path / "undisturbed" / name)


def test_a_run_saves_and_ends_if_the_reader_of_its_output_ends(start, data, tmp_path):
    params, run = write_params(tmp_path, data), tmp_path / "run"
    process = start("fit", params, "--max_steps", FAR, "--checkpoint_steps", FAR)
    assert process.stdout.readline().startswith("Stages")
    wait_until(lambda: steps_done(run) >= 1, process)
    process.stdout.close()  # as `head` does
    assert process.wait(200) == 130
    err = process.stderr.read()
    assert "the reader of the output has ended" in err and "Traceback" not in err
    assert complete_checkpoints(run) == [run / f"checkpoint_{steps_done(run)}"]
    process.stdout = None  # the fixture must not read the closed pipe


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hangs_up", [True, False], ids=["signal", "disowned"])
def test_a_run_outlives_its_terminal(start_in_terminal, data, tmp_path, ranks, hangs_up):
    params, run = write_params(tmp_path, data), tmp_path / "run"
    process, close = start_in_terminal(
        *("fit", params, "--max_steps", FAR, "--eval_frequency", 0, "--num_csx", ranks),
        *("--checkpoint_steps", FAR, "--log_steps", 1),
    )
    wait_until(lambda: steps_done(run) >= 3, process)
    close()
    if hangs_up:
        # The kernel sends the signal, and the shell sends it again.
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        process.send_signal(signal.SIGHUP)
    else:
        before = steps_done(run)
        wait_until(lambda: steps_done(run) >= before + 3, process)
        process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 130
    assert complete_checkpoints(run) == [run / f"checkpoint_{steps_done(run)}"]


def test_a_killed_run_resumes_bit_identically(start, headwater, data, tmp_path):
    params, run = write_params(tmp_path, data), tmp_path / "run"
    process = start("fit", params, "--max_steps", FAR, "--eval_frequency", 0)
    wait_until(lambda: len(complete_checkpoints(run)) >= 2, process)
    process.kill()
    process.wait()
    last = max(int(path.name.split("_")[1]) for path in complete_checkpoints(run))
    end = max(last, steps_done(run)) + 2
    code, out, _ = headwater("fit", run, "--max_steps", end)
    assert code == 0 and "continuing from step" in out
    undisturbed = write_params(tmp_path, data, "undisturbed")
    assert headwater("fit", undisturbed, "--max_steps", end, "--eval_frequency", 0)[0] == 0
    assert history(run) == history(tmp_path / "undisturbed")
    assert_same_checkpoint(run / f"checkpoint_{end}", tmp_path / "undisturbed" / f"checkpoint_{end}")


@pytest.mark.parametrize(
    ("last", "said"),
    [("Path('runs/checkpoint_4')", "checkpoint_4 is complete"), ("None", "the run has no checkpoint")],
)
def test_a_second_signal_stops_at_once(last, said):
    script = (
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from headwater.trainer.interrupt import interrupts\n"
        f"with interrupts(lambda: {last}) as interrupt:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert interrupt.requested\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(250)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 130
    assert "repeat the signal to stop at once" in done.stderr
    assert f"stopped; {said}" in done.stderr
