"""Jobs from many processes at once while the supervisor is killed: `python -m benchmarks.job_queue`.

Each job appends a line to a common file when it starts and when it ends. So the lines are in the order of all
starts and ends. In the end every job must have started once and ended with the right result, and two jobs
must never have had the same CSX at the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import Queue, new_token
from headwater.appliance.supervisor import ensure_supervisor
from headwater.appliance.types import Job, Phase, Priority, Submission

NUM_CSX = 4
JOB = "echo start $HEADWATER_JOB $HEADWATER_CSX >> {}; sleep {}; echo end $HEADWATER_JOB >> {}; exit {}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run under load.

    Attributes:
        jobs: number of submitted jobs.
        kills: number of killed supervisors.
        succeeded: number of jobs that succeeded.
        failed: number of jobs that failed on purpose, each with a reason.
        problems: violations of what the queue promises.
        submit_s: seconds until the last job was submitted.
        total_s: seconds until the last one was over.
    """

    jobs: int
    kills: int
    succeeded: int
    failed: int
    problems: list[str]
    submit_s: float
    total_s: float


def open_own(folder: QueueFolder) -> Queue:
    """Open the queue; it starts a supervisor if none runs."""
    return EmbeddedQueue(Database(folder), Caller.myself(), lambda: ensure_supervisor(folder))


def submit(folder: QueueFolder, count: int, seed: int) -> None:
    """Submit jobs of random sizes, durations and priorities; every tenth fails."""
    queue, draw, records = open_own(folder), random.Random(seed), folder.path.parent / "records"
    for index in range(count):
        fails = int(index % 10 == 9)
        command = JOB.format(records, f"{draw.uniform(0, 0.1):.3f}", records, fails)
        submission = Submission(
            ("sh", "-c", command),
            folder.path.parent,
            environment={"PATH": os.environ["PATH"]},
            num_csx=draw.choice([1, 1, 1, 2, 3, 4]),
            priority=draw.choice(list(Priority)),
            labels={"fails": str(fails)},
        )
        queue.submit(submission, new_token())


def kill_supervisor(folder: QueueFolder) -> int:
    """Kill the running supervisors and return their number."""
    killed = 0
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "headwater.appliance.supervisor" in words and str(folder.path) in words:
                process.kill()
                killed += 1
        except psutil.Error:
            continue
    return killed


def run(place: Path, *, jobs: int, submitters: int, kills: int, seed: int = 0) -> Outcome:
    """Submit from several processes at once, kill supervisors at random instants, and return the result."""
    folder, draw = QueueFolder(place / "queue"), random.Random(seed)
    prepare(folder, num_csx=NUM_CSX, grace_s=5)
    begin, queue = time.monotonic(), open_own(folder)
    command = [sys.executable, "-m", "benchmarks.job_queue", "--submit_to", str(folder.path)]
    shares = ["--jobs", str(jobs // submitters), "--seed"]
    processes = [
        subprocess.Popen([*command, *shares, str(seed * 1000 + index)], cwd=Path(__file__).parents[1])
        for index in range(submitters)
    ]
    killed, submit_s, over = 0, 0.0, 0
    at = sorted(draw.uniform(0, 0.9) for _ in range(kills))  # jobs that are over, as fractions
    while over < jobs:
        over = sum(job.phase.over for job in queue.jobs(everything=True))
        if not submit_s and all(process.poll() is not None for process in processes):
            submit_s = time.monotonic() - begin
        if killed < kills and over >= at[killed] * jobs:
            time.sleep(draw.uniform(0, 0.3))
            killed += kill_supervisor(folder)
        time.sleep(0.05)
    total_s = time.monotonic() - begin
    found = queue.jobs(everything=True)
    problems = check(found, (place / "records").read_text().splitlines())
    problems += [f"submitter ended with {process.returncode}" for process in processes if process.returncode]
    if len(found) != jobs:
        problems.append(f"{len(found)} jobs of {jobs}")
    phases = Counter(job.phase for job in found)
    kill_supervisor(folder)
    return Outcome(jobs, killed, phases[Phase.SUCCEEDED], phases[Phase.FAILED], problems, submit_s, total_s)


def check(jobs: list[Job], records: list[str]) -> list[str]:
    """Return problems: jobs that started twice or ended wrongly, and CSXs that two jobs shared."""
    problems: list[str] = []
    starts: Counter[str] = Counter()
    owners: dict[str, str] = {}
    for record in records:
        event, name, *rest = record.split()
        if event == "start":
            starts[name] += 1
            for csx in rest[0].split(","):
                if csx in owners:
                    problems.append(f"{name} and {owners[csx]} had CSX {csx} at the same time")
                owners[csx] = name
        else:
            owners = {csx: owner for csx, owner in owners.items() if owner != name}
    for job in jobs:
        expected = Phase.FAILED if job.labels["fails"] == "1" else Phase.SUCCEEDED
        if starts[job.name] != 1:
            problems.append(f"{job.name} was started {starts[job.name]} times: {job.phase}, {job.reason}")
        if job.phase != expected or (job.phase == Phase.FAILED and not job.reason):
            problems.append(f"{job.name} is {job.phase} and not {expected}: {job.reason}")
        if len(job.systems) != job.num_csx:
            problems.append(f"{job.name} had {job.systems} and not {job.num_csx} CSXs")
    return problems


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--submitters", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--submit_to", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.submit_to:
        submit(QueueFolder(args.submit_to), args.jobs, args.seed)
        return
    from benchmarks.runner import is_part, save

    with tempfile.TemporaryDirectory() as place:
        outcome = run(
            Path(place), jobs=args.jobs, submitters=args.submitters, kills=args.kills, seed=args.seed
        )
    print(outcome)
    part = is_part(parser, args, "jobs", "kills")
    save("job_queue", dataclasses.asdict(outcome), part=part)
    if outcome.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
