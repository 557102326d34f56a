"""The queue of a cluster that Slurm manages. Every request runs one of Slurm's programs.

A CSX is a generic resource (GRES) named `csx`, which the cluster's `gres.conf` defines. Slurm has no fields
for labels, priority class and model_dir: they are stored in the job's comment. The command is the job's name.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.appliance.database import unknown_job
from headwater.appliance.embedded import job_over, merge_labels, model_dir_taken
from headwater.appliance.queue import Queue, read_local_log
from headwater.appliance.types import Job, Phase, Priority, Submission, ending
from headwater.core.errors import ConfigError, QueueError
from headwater.core.placement import JOB, check_csx_limit

_TIMEOUT_S = 60.0
_NICE = {Priority.P1: 0, Priority.P2: 10_000, Priority.P3: 20_000}
_MAX_TEXT = 1000
"""Longest name or comment, in characters. Slurm's own limit is slightly higher."""

_FIELD, _RECORD = "\x1f", "\x1e"
_FIELDS = (
    "JobID",
    "UserName",
    "State",
    "Reason",
    "Comment",
    "Name",
    "WorkDir",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "exit_code",
    "tres-per-node",
    "NodeList",
)
_PHASES = {
    "PENDING": Phase.QUEUED,
    "REQUEUED": Phase.QUEUED,
    "REQUEUE_HOLD": Phase.QUEUED,
    "SPECIAL_EXIT": Phase.QUEUED,
    "CONFIGURING": Phase.INITIALIZING,
    "RUNNING": Phase.RUNNING,
    "COMPLETING": Phase.RUNNING,
    "SUSPENDED": Phase.RUNNING,
    "STOPPED": Phase.RUNNING,
    "SIGNALING": Phase.RUNNING,
    "RESIZING": Phase.RUNNING,
    "STAGE_OUT": Phase.RUNNING,
    "COMPLETED": Phase.SUCCEEDED,
    "CANCELLED": Phase.CANCELLED,
}
"""State in Slurm -> phase of a job. A state that is not listed means that the job has failed."""

_HELD = "JobHeldUser"
_METADATA_KEYS = {"token", "labels", "priority", "model_dir", "log"}
_CSX = re.compile(r"\bcsx(?::[A-Za-z_]\w*)?:(\d+)")


class SlurmQueue(Queue):
    """The queue of a Slurm cluster. It contains the jobs submitted with Headwater; Slurm manages permissions.

    Raises:
        QueueError: if Slurm is not installed.
    """

    def __init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise QueueError(
                "the command sbatch was not found: Slurm is not installed on this machine",
                remedy="use a machine of the cluster, or the embedded queue: --queue embedded",
            )

    def submit(self, submission: Submission, token: str) -> Job:
        check_csx_limit(
            submission.num_csx,
            self.num_csx(),
            "CSXs of the cluster",
            where="gres csx",
            remedy="define more csx in the cluster's gres.conf",
        )
        live = self._live_metadata()
        known = next((name for name, metadata in live if metadata.get("token") == token), None)
        if known is None:
            known = _submit(submission, token)
            # The job is still held, so Slurm cannot start it before this check.
            self._refuse_taken(known, submission)
            _ask("scontrol", "release", known)
        return self.show(known)

    def jobs(self, *, everything: bool = False) -> list[Job]:
        jobs = [_job(record) for record in _records() if _metadata(record) is not None]
        return [job for job in jobs if everything or not job.phase.over]

    def show(self, name: str) -> Job:
        return _job(self._record(name))

    def cancel(self, name: str) -> Job:
        job = self._live(name)
        metadata = _metadata(self._record(name)) or {}
        if job.phase == Phase.RUNNING and not metadata.get("cancelled"):
            # This comes before the signal: the job may end at once, and its record cannot change afterwards.
            self._write_metadata(name, {**metadata, "cancelled": True})
            # Signal only the main process, which forwards the signal. A rank that receives it a second time
            # would stop at once.
            _ask("scancel", "--batch", "--signal=TERM", name)
        else:
            _ask("scancel", name)
        return self.show(name)

    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        job = self._live(name)
        metadata = _metadata(self._record(name)) or {}
        self._write_metadata(name, {**metadata, "labels": merge_labels(job.labels, labels, name)})
        return self.show(name)

    def set_priority(self, name: str, priority: Priority) -> Job:
        job = self._live(name)
        if job.phase not in (Phase.CREATED, Phase.QUEUED):
            raise QueueError(
                f"the priority of job {name} cannot change: it is {job.phase}",
                remedy="change priorities only of jobs that are CREATED or QUEUED",
            )
        self._write_metadata(name, {**(_metadata(self._record(name)) or {}), "priority": priority})
        _ask("scontrol", "update", f"JobId={name}", f"Nice={_NICE[priority]}")
        return self.show(name)

    def num_csx(self) -> int:
        nodes = _ask("sinfo", "--noheader", "--Node", "--format=%N %G").splitlines()
        # A node is listed once for each partition.
        return sum(int(count) for line in set(nodes) for count in _CSX.findall(line))

    def read_log(self, job: Job, position: int) -> bytes:
        return read_local_log(job, position)

    def _record(self, name: str) -> dict[str, str]:
        record = next((one for one in _records() if one["JobID"] == name), None)
        if record is None or _metadata(record) is None:
            raise unknown_job(name)
        return record

    def _live(self, name: str) -> Job:
        job = self.show(name)
        if job.phase.over:
            raise job_over(name, job.phase)
        return job

    def _live_metadata(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the names of the unfinished jobs, with their metadata."""
        return [
            (record["JobID"], metadata)
            for record in _records()
            if (metadata := _metadata(record)) is not None and not _phase(record, metadata).over
        ]

    def _write_metadata(self, name: str, metadata: Mapping[str, Any]) -> None:
        _ask("scontrol", "update", f"JobId={name}", f"Comment={_comment(metadata)}")

    def _refuse_taken(self, name: str, submission: Submission) -> None:
        """Cancel a new job whose model_dir an older unfinished job uses, and raise `QueueError`.

        The check comes after the submission, while the job is held: so of two jobs that are submitted at the
        same time, exactly one remains.
        """
        for other, metadata in self._live_metadata():
            mine = submission.model_dir and str(submission.model_dir)
            if mine and metadata["model_dir"] == mine and int(other) < int(name):
                _ask("scancel", name)
                raise model_dir_taken(other, self.show(other).phase, submission)


def _submit(submission: Submission, token: str) -> str:
    """Submit a job to Slurm in the held state, and return its name."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = submission.model_dir or Path(state) / "headwater" / "slurm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QueueError(
            f"the folder for the log cannot be created: {error.strerror}",
            where=str(folder),
            remedy="make the folder above it writable, or name another model_dir",
        ) from error
    metadata = {
        "token": token,
        "labels": dict(submission.labels),
        "priority": submission.priority,
        "model_dir": submission.model_dir and str(submission.model_dir),
        "log": str(folder),
    }
    command = shlex.join(submission.command)
    script = f"#!/bin/sh\nexport {JOB}=$SLURM_JOB_ID\numask {submission.umask:04o}\nexec {command}\n"
    words = (
        "--parsable",
        "--hold",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={submission.num_csx}",
        f"--gres=csx:{submission.num_csx}",
        f"--nice={_NICE[submission.priority]}",
        f"--job-name={command if len(command) <= _MAX_TEXT else submission.command[0]}",
        f"--comment={_comment(metadata)}",
        f"--chdir={submission.folder}",
        f"--output={str(folder).replace('%', '%%')}/%j.log",
        "--open-mode=append",
    )
    environment = {**os.environ, **submission.environment}
    # A job that submits this one must not pass on its own name.
    environment.pop(JOB, None)
    return _ask("sbatch", *words, stdin=script, environment=environment).strip().split(";")[0]


def _comment(metadata: Mapping[str, Any]) -> str:
    """Encode a job's metadata as base64, without characters that are special to Slurm."""
    text = base64.urlsafe_b64encode(json.dumps(metadata).encode()).decode()
    if len(text) > _MAX_TEXT:
        raise ConfigError(
            f"labels and model_dir need {len(text)} characters in Slurm's comment, the limit is {_MAX_TEXT}",
            remedy="write shorter ones",
        )
    return text


def _metadata(record: Mapping[str, str]) -> dict[str, Any] | None:
    """Decode a job's metadata from its comment; return `None` for a job that Headwater did not submit."""
    try:
        metadata = json.loads(base64.urlsafe_b64decode(record["Comment"]))
    except ValueError:
        return None
    return metadata if isinstance(metadata, dict) and metadata.keys() >= _METADATA_KEYS else None


def _records() -> list[dict[str, str]]:
    """Return Slurm's records of all jobs. Slurm deletes them some minutes after a job's end (`MinJobAge`)."""
    ends = [_FIELD] * (len(_FIELDS) - 1) + [_RECORD]
    style = ",".join(f"{name}:{end}" for name, end in zip(_FIELDS, ends, strict=True))
    text = _ask("squeue", "--noheader", "--states=all", f"--Format={style}")
    # Control characters separate the fields, because a command may contain any printable one.
    lines = [line.removeprefix("\n").split(_FIELD) for line in text.split(_RECORD)]
    records = [dict(zip(_FIELDS, line, strict=True)) for line in lines if len(line) == len(_FIELDS)]
    return sorted(records, key=lambda record: record["JobID"].zfill(20))


def _phase(record: Mapping[str, str], metadata: Mapping[str, Any]) -> Phase:
    phase = _PHASES.get(record["State"], Phase.FAILED)
    # `submit` has not released this job yet.
    if phase == Phase.QUEUED and record["Reason"] == _HELD:
        return Phase.CREATED
    return Phase.CANCELLED if phase.over and metadata.get("cancelled") else phase


def _job(record: Mapping[str, str]) -> Job:
    metadata = _metadata(record)
    assert metadata is not None, "the caller has skipped jobs that Headwater did not submit"
    phase = _phase(record, metadata)
    model_dir = metadata["model_dir"] and Path(metadata["model_dir"])
    started = _moment(record["StartTime"]) if phase not in (Phase.CREATED, Phase.QUEUED) else None
    exit_code = os.waitstatus_to_exitcode(int(record["exit_code"])) if phase.over and started else None
    num_csx = _CSX.search(record["tres-per-node"])
    return Job(
        name=record["JobID"],
        user=record["UserName"],
        command=_command(record["Name"]),
        folder=Path(record["WorkDir"]),
        num_csx=int(num_csx[1]) if num_csx else 0,
        model_dir=model_dir,
        priority=Priority(metadata["priority"]),
        labels=metadata["labels"],
        phase=phase,
        reason=_reason(record, phase, exit_code, cancelled="cancelled" in metadata),
        exit_code=exit_code,
        systems=tuple(filter(None, [record["NodeList"]])),
        log=Path(metadata["log"]) / f"{record['JobID']}.log",
        created=_moment(record["SubmitTime"]) or 0.0,
        started=started,
        ended=_moment(record["EndTime"]) if phase.over else None,
    )


def _command(name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(name))
    except ValueError:  # the job was renamed
        return (name,)


def _reason(record: Mapping[str, str], phase: Phase, exit_code: int | None, *, cancelled: bool) -> str | None:
    if phase in (Phase.RUNNING, Phase.SUCCEEDED):
        return None
    words = [word for word in (record["State"], record["Reason"]) if word != "None"]
    if phase.over and exit_code:
        return "; ".join([*(["cancelled"] if cancelled else words), ending(exit_code)])
    return "; ".join(words)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def _ask(
    program: str, *words: str, stdin: str | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Run one of Slurm's programs and return its output.

    Args:
        program: name of the program.
        words: its arguments.
        stdin: text for its standard input.
        environment: its environment variables.

    Raises:
        QueueError: if it fails or does not answer, with its error output.
    """
    try:
        done = subprocess.run(
            [program, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**environment, "SLURM_TIME_FORMAT": "%s"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueError(
            f"{program} does not answer: {error}",
            remedy=f"check that {program} works in a shell on this host",
        ) from error
    if done.returncode:
        raise QueueError(
            f"{program} failed: {done.stderr.strip() or done.stdout.strip()}",
            where=f"Slurm's {program}",
            remedy="change the options that Slurm refuses, or ask the administrator of the cluster",
        )
    return done.stdout
