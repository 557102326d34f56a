"""The queue of a cluster that Slurm manages: every question is one of its commands.

A CSX is a generic resource of Slurm, `csx`, as the cluster's `gres.conf` defines it. What Slurm has no word
for (labels, priority class, model_dir) travels in the job's comment, the command in its name.
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
from headwater.appliance.embedded import JOB, job_over, merge_labels, model_dir_taken
from headwater.appliance.queue import Queue
from headwater.appliance.types import Job, Phase, Priority, Submission, ending
from headwater.core.errors import ConfigError, QueueError

_TIMEOUT_S = 60.0
_NICE = {Priority.P1: 0, Priority.P2: 10_000, Priority.P3: 20_000}
_MAX_TEXT = 1000
"""Slurm takes names and comments of little more."""

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
"""Every other state is a way to fail."""

_HELD = "JobHeldUser"
_TOLD = {"token", "labels", "priority", "model_dir", "log"}
_CSX = re.compile(r"\bcsx(?::[A-Za-z_]\w*)?:(\d+)")


class SlurmQueue(Queue):
    """The jobs of a Slurm cluster that were submitted here; users and their rights are Slurm's.

    Raises:
        QueueError: if Slurm is not installed.
    """

    def __init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise QueueError(
                "Slurm is not here: there is no command sbatch",
                remedy="use a machine of the cluster, or the embedded queue: --queue embedded",
            )

    def submit(self, submission: Submission, token: str) -> Job:
        _check(submission, self.num_csx())
        known = next((name for name, told in self._told() if told.get("token") == token), None)
        if known is None:
            known = _submit(submission, token)
            self._refuse_taken(known, submission)
            _ask("scontrol", "release", known)
        return self.show(known)

    def jobs(self, *, everything: bool = False) -> list[Job]:
        jobs = [_job(record) for record in _records() if _told(record) is not None]
        return [job for job in jobs if everything or not job.phase.over]

    def show(self, name: str) -> Job:
        return _job(self._record(name))

    def cancel(self, name: str) -> Job:
        job = self._live(name)
        told = _told(self._record(name)) or {}
        if job.phase == Phase.RUNNING and not told.get("cancelled"):
            self._tell(name, {**told, "cancelled": True})
            # Its main process alone, which tells the others as it sees fit: a rank asked twice stops at once.
            _ask("scancel", "--batch", "--signal=TERM", name)
        else:
            _ask("scancel", name)
        return self.show(name)

    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        job = self._live(name)
        told = _told(self._record(name)) or {}
        self._tell(name, {**told, "labels": merge_labels(job.labels, labels, name)})
        return self.show(name)

    def set_priority(self, name: str, priority: Priority) -> Job:
        job = self._live(name)
        if job.phase not in (Phase.CREATED, Phase.QUEUED):
            raise QueueError(f"job {name} is {job.phase}: it has its CSXs, whatever its priority")
        self._tell(name, {**(_told(self._record(name)) or {}), "priority": priority})
        _ask("scontrol", "update", f"JobId={name}", f"Nice={_NICE[priority]}")
        return self.show(name)

    def num_csx(self) -> int:
        nodes = _ask("sinfo", "--noheader", "--Node", "--format=%N %G").splitlines()
        return sum(int(count) for line in set(nodes) for count in _CSX.findall(line))

    def _record(self, name: str) -> dict[str, str]:
        record = next((one for one in _records() if one["JobID"] == name), None)
        if record is None or _told(record) is None:
            raise unknown_job(name)
        return record

    def _live(self, name: str) -> Job:
        job = self.show(name)
        if job.phase.over:
            raise job_over(name, job.phase)
        return job

    def _told(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of the jobs that are not over, with what their comments say."""
        return [
            (record["JobID"], told)
            for record in _records()
            if (told := _told(record)) is not None and not _phase(record, told).over
        ]

    def _tell(self, name: str, told: Mapping[str, Any]) -> None:
        _ask("scontrol", "update", f"JobId={name}", f"Comment={_comment(told)}")

    def _refuse_taken(self, name: str, submission: Submission) -> None:
        """Of two jobs with one model_dir the older stays; the younger is held until this is known."""
        for other, told in self._told():
            mine = submission.model_dir and str(submission.model_dir)
            if mine and told["model_dir"] == mine and int(other) < int(name):
                _ask("scancel", name)
                raise model_dir_taken(other, self.show(other).phase, submission)


def _check(submission: Submission, num_csx: int) -> None:
    if not 1 <= submission.num_csx <= num_csx:
        raise ConfigError(
            f"{submission.num_csx} CSXs are asked for, and the cluster has {num_csx}",
            where="gres csx",
            remedy="write fewer, or have csx in the cluster's gres.conf",
        )


def _submit(submission: Submission, token: str) -> str:
    """Hands a job over, held; its name."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = submission.model_dir or Path(state) / "headwater" / "slurm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QueueError(f"the log cannot be there: {error.strerror}", where=str(folder)) from error
    told = {
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
        f"--comment={_comment(told)}",
        f"--chdir={submission.folder}",
        f"--output={str(folder).replace('%', '%%')}/%j.log",
        "--open-mode=append",
    )
    environment = {**os.environ, **submission.environment}
    environment.pop(JOB, None)
    return _ask("sbatch", *words, stdin=script, environment=environment).strip().split(";")[0]


def _comment(told: Mapping[str, Any]) -> str:
    """What is told, in characters that mean nothing to Slurm."""
    text = base64.urlsafe_b64encode(json.dumps(told).encode()).decode()
    if len(text) > _MAX_TEXT:
        raise ConfigError("labels and model_dir are too long for Slurm", remedy="write shorter ones")
    return text


def _told(record: Mapping[str, str]) -> dict[str, Any] | None:
    """What `_comment` wrote; `None` for a job that was submitted by other means."""
    try:
        told = json.loads(base64.urlsafe_b64decode(record["Comment"]))
    except ValueError:
        return None
    return told if isinstance(told, dict) and told.keys() >= _TOLD else None


def _records() -> list[dict[str, str]]:
    """What Slurm knows of all jobs; it forgets one some minutes after its end (`MinJobAge`)."""
    ends = [_FIELD] * (len(_FIELDS) - 1) + [_RECORD]
    style = ",".join(f"{name}:{end}" for name, end in zip(_FIELDS, ends, strict=True))
    text = _ask("squeue", "--noheader", "--states=all", f"--Format={style}")
    lines = [line.removeprefix("\n").split(_FIELD) for line in text.split(_RECORD)]
    records = [dict(zip(_FIELDS, line, strict=True)) for line in lines if len(line) == len(_FIELDS)]
    return sorted(records, key=lambda record: record["JobID"].zfill(20))


def _phase(record: Mapping[str, str], told: Mapping[str, Any]) -> Phase:
    phase = _PHASES.get(record["State"], Phase.FAILED)
    if phase == Phase.QUEUED and record["Reason"] == _HELD:
        return Phase.CREATED
    return Phase.CANCELLED if phase.over and told.get("cancelled") else phase


def _job(record: Mapping[str, str]) -> Job:
    told = _told(record)
    assert told is not None, "jobs of others are left out before"
    phase = _phase(record, told)
    model_dir = told["model_dir"] and Path(told["model_dir"])
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
        priority=Priority(told["priority"]),
        labels=told["labels"],
        phase=phase,
        reason=_reason(record, phase, exit_code, cancelled="cancelled" in told),
        exit_code=exit_code,
        systems=tuple(filter(None, [record["NodeList"]])),
        log=Path(told["log"]) / f"{record['JobID']}.log",
        created=_moment(record["SubmitTime"]) or 0.0,
        started=started,
        ended=_moment(record["EndTime"]) if phase.over else None,
    )


def _command(name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(name))
    except ValueError:  # somebody has given it another name since
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
    """What one of Slurm's programs answers.

    Raises:
        QueueError: if it refuses; says why.
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
        raise QueueError(f"{program} does not answer: {error}") from error
    if done.returncode:
        raise QueueError(f"Slurm refuses: {done.stderr.strip() or done.stdout.strip()}", where=program)
    return done.stdout
