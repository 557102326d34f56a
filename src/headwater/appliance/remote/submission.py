"""Submission of a job with its files to an appliance, exactly once."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from headwater.appliance.queue import new_token
from headwater.appliance.remote.bundle import Bundle, send
from headwater.appliance.remote.connection import Connection
from headwater.appliance.types import Job, Priority
from headwater.core.errors import QueueError


@dataclasses.dataclass(frozen=True)
class RemoteSubmission:
    """A request to run a job on an appliance.

    Attributes:
        command: program and arguments, or if `is_headwater` the words after `headwater`. In both
            `MODEL_DIR` stands for the folder of the run on the appliance.
        is_headwater: true for a command of Headwater.
        bundle: files of the job's working folder.
        python_paths: folders in the working folder from which the job imports modules.
        run: name of the run's folder on the appliance; `None` for a job without a model_dir.
        only_reads: true if the job writes nothing to the folder of the run. It then has no artifacts, and may
            run beside the job that writes there.
        model_dir: folder on this machine for the artifacts of the run.
        num_csx: number of CSXs.
        priority: priority of the job.
        labels: the user's labels.
        umask: file mode creation mask of the job.
    """

    command: tuple[str, ...]
    is_headwater: bool
    bundle: Bundle
    python_paths: tuple[str, ...] = ()
    run: str | None = None
    only_reads: bool = False
    model_dir: Path | None = None
    num_csx: int = 1
    priority: Priority = Priority.P2
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    umask: int = 0o022


def submit(connection: Connection, submission: RemoteSubmission, say: Callable[[str], None]) -> Job:
    """Send the files of a job and submit the job. Return it as the queue of the appliance shows it.

    The submission has a token. So it creates one job, however often the connection breaks.

    Args:
        connection: to the appliance.
        submission: the job.
        say: prints notices.

    Raises:
        QueueError: if the appliance has another version of Headwater, or its queue refuses the job.
        ConfigError: if the job needs more CSXs than the appliance has.
        StoreError: if a file cannot be read or written.
    """
    here, there = version("headwater"), connection.ask("ping").header["answer"]
    if submission.is_headwater and here != there:
        raise QueueError(
            f"expected headwater {here}, which this machine has, got headwater {there}",
            where=str(connection.address),
            remedy="install the same version on both machines",
        )
    files = send(connection, submission.bundle, say)
    model_dir = submission.model_dir and str(submission.model_dir.absolute())
    reply = connection.ask(
        "submit",
        token=new_token(),
        command=list(submission.command),
        is_headwater=submission.is_headwater,
        files=files,
        python_paths=list(submission.python_paths),
        run=submission.run,
        only_reads=submission.only_reads,
        origin={"host": platform.node(), "model_dir": model_dir},
        num_csx=submission.num_csx,
        priority=submission.priority,
        labels=dict(submission.labels),
        umask=submission.umask,
    )
    return Job.from_record(reply.header["answer"])
