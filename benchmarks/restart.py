"""Time until training continues after a kill: `python -m benchmarks.restart`.

A queue runs the tiny GPT on two ranks. The benchmark kills a rank, or the watcher of the job, or the
supervisor; in the last case it also cancels the job. Then it submits the run again. It measures the time from
the kill to the end of the next step, and how much of this time was before the submission.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.job_queue import kill_supervisor, open_own
from benchmarks.kill import command, write_data
from benchmarks.options import end_on_sigterm, positive
from benchmarks.runner import Row, is_part, print_table, save
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import Queue, new_token
from headwater.appliance.types import Job, Phase, Submission
from headwater.core.errors import QueueError

_POLL_S = 0.02
_LIMIT_S = 300.0
"""Seconds until a job must have started, ended or taken a step. On a busy machine a restart took 31 s."""


class NotRestartedError(RuntimeError):
    """A job ended in another way than expected, or took too long."""


def wait_for(queue: Queue, job: Job, condition: Callable[[], bool]) -> None:
    """Block until a running job meets a condition.

    Raises:
        NotRestartedError: if the job ends before, or takes too long.
    """
    end = time.monotonic() + _LIMIT_S
    while not condition():
        now = queue.show(job.name)
        if now.phase.over or time.monotonic() > end:
            printed = "".join(queue.logs(job.name))[-2000:]
            raise NotRestartedError(f"{job.name} is {now.phase}: {now.reason or 'it is too slow'}\n{printed}")
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


def kill_supervisor_and_cancel(folder: QueueFolder, model_dir: Path) -> None:
    """Kill the supervisor: the job continues, and cancelling it starts another supervisor."""
    kill_supervisor(folder)
    queue = open_own(folder)
    for job in queue.jobs():
        queue.cancel(job.name)


Kill = Callable[[QueueFolder, Path], None]
KILLS: dict[str, Kill] = {
    "rank": kill_rank,
    "watcher": kill_watcher,
    "supervisor": kill_supervisor_and_cancel,
}


def restart_s(folder: QueueFolder, data: Path, model_dir: Path, kill: Kill) -> tuple[float, float]:
    """Return seconds from a kill to the end of the job, and to the end of the first step of the next job.

    Raises:
        NotRestartedError: if a job ends in another way, or takes too long.
    """
    queue = open_own(folder)
    job = submit(queue, data, model_dir)
    wait_for(queue, job, lambda: any(model_dir.glob("checkpoint_*/manifest.json")))
    start = time.monotonic()
    kill(folder, model_dir)
    ended = queue.wait(job.name, _LIMIT_S)
    if ended.phase not in (Phase.FAILED, Phase.CANCELLED):
        raise NotRestartedError(f"expected a killed job that failed or was cancelled, found {ended.phase}")
    over_s = time.monotonic() - start
    before = steps_done(model_dir)
    again = submit(queue, data, model_dir)
    wait_for(queue, again, lambda: steps_done(model_dir) > before)
    took_s = time.monotonic() - start
    queue.cancel(again.name)
    queue.wait(again.name, _LIMIT_S)
    return over_s, took_s


@contextlib.contextmanager
def opened(place: Path) -> Iterator[QueueFolder]:
    """Create a queue in a folder; at the end its supervisor and the processes of its jobs end."""
    folder = QueueFolder(place / "queue")
    prepare(folder, num_csx=2, grace_s=60)
    try:
        yield folder
    finally:
        kill_supervisor(folder)
        for process in processes_of(place):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=positive, default=3, help="kills of each kind (%(default)s)")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    end_on_sigterm()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in KILLS}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-restart-") as name:
        place = Path(name)
        write_data(place / "data")
        for number in range(args.times):
            for killed, kill in KILLS.items():
                if killed in failures:
                    continue
                # A queue for each kill: a job that a failed attempt left would keep the next one waiting.
                with opened(place / f"{killed}_{number}") as folder:
                    try:
                        found = restart_s(folder, place / "data", folder.path.parent / "run", kill)
                    except (NotRestartedError, QueueError) as error:
                        print(f"{killed}: {error}", file=sys.stderr, flush=True)
                        failures[killed] = str(error).splitlines()[0]
                        continue
                seconds[killed].append(found)
                print(
                    f"{number + 1}/{args.times}  {killed}: over after {found[0]:.1f} s, "
                    f"next step after {found[1]:.1f} s",
                    flush=True,
                )
    rows = [row_of(killed, times, failures) for killed, times in seconds.items()]
    print_table(rows)
    part = is_part(parser, args, "times")
    print(save("restart", {"rows": rows, "seconds": seconds}, part=part))
    return 1 if failures else 0


def row_of(killed: str, times: list[tuple[float, float]], failures: dict[str, str]) -> Row:
    """Return the row of a kind of kill: medians, or why it failed."""
    if killed in failures:
        return {"killed": killed, "failed": failures[killed]}
    over_s, next_s = (round(statistics.median(each), 1) for each in zip(*times, strict=True))
    return {"killed": killed, "over_s": over_s, "next_step_s": next_s}


if __name__ == "__main__":
    sys.exit(main())
