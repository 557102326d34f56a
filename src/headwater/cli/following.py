"""Following of a job on an appliance in a terminal: its log, its artifacts, and Ctrl-C."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.follower import Follower
from headwater.appliance.remote.mirror import Mirror
from headwater.appliance.remote.queue import RemoteQueue
from headwater.appliance.remote.run_link import FILE
from headwater.appliance.types import Job, Phase
from headwater.cli.appliance_option import say
from headwater.core.errors import HeadwaterError
from headwater.core.exit_codes import INTERRUPTED

ARTIFACTS = ("all", "small", "none")
ON_INTERRUPT = ("ask", "detach", "cancel")
_CHECKPOINT = "checkpoint_"


def add_following_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a job on an appliance is followed."""
    group = parser.add_argument_group("options for a job on an appliance")
    group.add_argument(
        "--artifacts",
        choices=ARTIFACTS,
        default="all",
        help="files of the run to copy to this machine; small: all except checkpoints (%(default)s)",
    )
    add_interrupt_option(group)


def add_interrupt_option(parser: argparse._ActionsContainer) -> None:
    """Add the option that says what Ctrl-C does while a job on an appliance is followed."""
    parser.add_argument(
        "--on_interrupt",
        choices=ON_INTERRUPT,
        default="ask",
        help="effect of Ctrl-C on a job on an appliance; ask means detach if stdin is not a terminal "
        "(%(default)s)",
    )


def is_wanted(artifacts: str) -> Callable[[str], bool]:
    """Return a function that is true for the paths of artifacts to copy; see `ARTIFACTS`."""
    # The file that names the run belongs to this machine.
    skipped = (FILE, _CHECKPOINT) if artifacts == "small" else (FILE,)
    return lambda path: not path.startswith(skipped)


def follow(connection: Connection, job: Job, folder: Path | None, args: argparse.Namespace) -> int:
    """Print the log of a job and copy its artifacts until it is over; return the exit code.

    Args:
        connection: to the appliance.
        job: the job.
        folder: for the artifacts; `None` to copy nothing.
        args: has the options of `add_following_options`.

    Returns:
        0 if the job succeeded; its exit code, or 1 without one, if it failed; 130 after Ctrl-C.

    Raises:
        HeadwaterError: if the job cannot be followed any more; how to continue is printed.
    """
    with contextlib.ExitStack() as closed:
        mirror = None
        if folder is not None and job.model_dir is not None and args.artifacts != "none":
            mirror = Mirror(connection, job.name, folder, is_wanted(args.artifacts), say)
            closed.callback(mirror.close)
        follower = Follower(connection, job.name, _writer(), mirror, print_phase)
        return _run(follower, connection, job, args.on_interrupt)


def _run(follower: Follower, connection: Connection, job: Job, on_interrupt: str) -> int:
    """Follow a job until it is over or the user detaches; return the exit code of `follow`."""
    interrupted = False
    while True:
        try:
            job = follower.run()
        except KeyboardInterrupt:
            choice = _choice(on_interrupt)
            if choice == "detach":
                print(detached(job, connection), file=sys.stderr)
                return INTERRUPTED
            if choice == "cancel":
                RemoteQueue(connection).cancel(job.name)
                say("asked the job to end; its last artifacts follow")
                interrupted = True
            continue
        except HeadwaterError:
            # The connection or the disk of this machine failed, not the job.
            print(detached(job, connection), file=sys.stderr)
            raise
        return INTERRUPTED if interrupted else exit_code(job)


def folder_of(origin: Mapping[str, Any], job: Job) -> Path:
    """Return the folder on this machine for the artifacts of a job.

    Args:
        origin: facts of the machine that submitted the job.
        job: the job.
    """
    if origin.get("host") == platform.node() and isinstance(origin.get("model_dir"), str):
        return Path(origin["model_dir"])
    return Path(job.name)


def print_phase(job: Job) -> None:
    """Print a notice if a job waits, or has not succeeded."""
    if job.phase == Phase.QUEUED:
        say(f"{job.name} waits for {job.num_csx} CSXs")
    elif job.phase.over and job.phase != Phase.SUCCEEDED:
        say(f"{job.name} is {job.phase}: {job.reason}")


def exit_code(job: Job) -> int:
    """Return the exit code of a command that has followed a job to its end."""
    if job.phase == Phase.SUCCEEDED:
        return 0
    return job.exit_code if job.exit_code is not None and job.exit_code > 0 else 1


def detached(job: Job, connection: Connection) -> str:
    """Return a text that says how to follow or cancel a job that continues."""
    jobs = f"headwater --appliance {connection.address} jobs"
    return (
        f"\nnot following {job.name} any more; it continues\n"
        f"  to follow it again: {jobs} attach {job.name}\n  to cancel it: {jobs} cancel {job.name}"
    )


def read_choice(answer: str) -> str:
    """Return what the user wants after Ctrl-C: `cancel`, `follow` or, for anything else, `detach`."""
    word = answer.strip().lower()
    return next((choice for choice in ("cancel", "follow") if word and choice.startswith(word)), "detach")


def _choice(on_interrupt: str) -> str:
    if on_interrupt != "ask":
        return on_interrupt
    if not sys.stdin.isatty():
        return "detach"
    question = "\n[d]etach and let the job continue, [f]ollow it further, or [c]ancel it? (d) "
    print(question, end="", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        return read_choice(sys.stdin.readline())
    return "detach"


def _writer() -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(data: bytes) -> None:
        # Incremental: a character may be cut by the end of a block.
        sys.stdout.write(decoder.decode(data))
        sys.stdout.flush()

    return write
