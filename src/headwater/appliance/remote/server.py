"""The server of one connection: answers the requests of a client with this user's rights, over two pipes.

Each request may come again after a connection broke, in another process of this server. So all that requests
leave behind is in files: contents, folders of jobs, and the queue itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headwater.appliance.open import open_queue
from headwater.appliance.queue import Queue
from headwater.appliance.remote.address import ENVIRONMENT
from headwater.appliance.remote.artifacts import Artifact, digest_of, list_artifacts, read_block
from headwater.appliance.remote.frames import MARK, PROTOCOL, Decoder, Frame, encode
from headwater.appliance.remote.workspace import MODEL_DIR, find_workspace
from headwater.appliance.requests import answer, refusal
from headwater.appliance.types import SAME_VERSION, Submission, read_fields, read_priority
from headwater.core.errors import HeadwaterError, QueueError
from headwater.core.placement import JOB

_BLOCK = 1 << 18
_LOOK_S, _MAX_WAIT_S = 0.2, 30.0
_UNSAFE = ("SSH_", JOB, "HEADWATER_CSX", ENVIRONMENT)
"""Beginnings of the names of environment variables that jobs do not inherit from the connection."""

_Handler = Callable[["Server", Mapping[str, Any], bytes], Frame]
_TEXT, _NUMBER = (str,), (int,)
_LISTS_OF_TEXTS = {"command", "digests", "python_paths"}


def serve(source: int, target: int) -> None:
    """Answer requests until the client ends the connection.

    Args:
        source: descriptor from which frames are read.
        target: descriptor to which frames are written.
    """
    server, decoder = Server(lambda: bool(select.select((source,), (), (), 0)[0])), Decoder()
    _write(target, MARK + encode(Frame({"protocol": PROTOCOL, "version": version("headwater")})))
    while data := os.read(source, _BLOCK):
        for frame in decoder.feed(data):
            _write(target, encode(server.reply(frame)))


def _write(target: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]


class Server:
    """Answers the requests of one client.

    Args:
        is_interrupted: true if a wait should end, because the client has sent something or is gone.
    """

    def __init__(self, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self._is_interrupted = is_interrupted
        self._workspace = find_workspace(None)
        self._queue: Queue | None = None

    def reply(self, request: Frame) -> Frame:
        """Return the reply to a request; an error is a reply too."""
        fields = dict(request.header)
        name = fields.pop("ask", None)
        try:
            if not isinstance(name, str) or name not in _HANDLERS:
                raise QueueError(
                    f"expected one of {', '.join(_HANDLERS)}, got {name!r}",
                    where="the request: ask",
                    remedy=SAME_VERSION,
                )
            types, handle = _HANDLERS[name]
            where = f"the request {name}"
            checked = read_fields(fields, types, where)
            _check_texts(checked, where)
            return handle(self, checked, request.body)
        except HeadwaterError as error:
            return Frame(refusal(error))

    def begin(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Choose the workspace."""
        self._workspace = find_workspace(fields["path"])
        self._workspace.create()
        self._workspace.contents.delete_unused()
        return Frame({"answer": str(self._workspace.path)})

    def ping(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Reply with the version of Headwater."""
        return Frame({"answer": version("headwater")})

    def forward(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Answer a request to the queue."""
        return Frame(answer(self._opened, json.dumps(fields["request"]).encode()))

    def find(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Reply with the number of bytes that are there of each content; null if it is complete."""
        received = self._workspace.contents.received
        return Frame({"answer": {digest: received(digest) for digest in fields["digests"]}})

    def add(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Store a part of a content, and reply with the number of its bytes; null if it is complete."""
        have = self._workspace.contents.add(fields["digest"], fields["size"], fields["position"], body)
        return Frame({"answer": have})

    def submit(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Lay out the folder of a job, and submit the job; reply with the job."""
        workspace, token = self._workspace, fields["token"]
        run = None if fields["run"] is None else workspace.run(fields["run"])
        command = tuple(word.replace(MODEL_DIR, str(run or MODEL_DIR)) for word in fields["command"])
        if fields["is_headwater"]:
            command = (sys.executable, "-P", "-m", "headwater", *command)
        folder = workspace.lay_out(token, fields["files"], fields["origin"])
        submission = Submission(
            command=command,
            folder=folder,
            environment=job_environment(os.environ, [folder / path for path in fields["python_paths"]]),
            num_csx=fields["num_csx"],
            # A model_dir belongs to one unfinished job. A job that only reads it may run beside that job.
            model_dir=None if fields["only_reads"] else run,
            priority=read_priority(fields["priority"]),
            labels=fields["labels"],
            umask=fields["umask"],
        )
        with self._opened() as queue:
            return Frame({"answer": queue.submit(submission, token).to_record()})

    def watch(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Reply with a job and the next part of its log; wait until there is news, but not too long."""
        wait_s = fields["wait_s"]
        if not wait_s >= 0:  # false for NaN too, with which the wait would never end
            raise QueueError(
                f"expected wait_s >= 0, got {wait_s}", where="the request watch", remedy=SAME_VERSION
            )
        end = time.monotonic() + min(wait_s, _MAX_WAIT_S)
        with self._opened() as queue:
            while True:
                # The job is read before its log. If the job is over, the log that is read next is complete.
                job = queue.show(fields["name"])
                data = queue.read_log(job, fields["position"])
                is_news = data or job.phase.over or job.phase != fields["phase"]
                if is_news or time.monotonic() > end or self._is_interrupted():
                    origin = self._workspace.origin(job)
                    return Frame({"answer": {"job": job.to_record(), "origin": origin}}, data)
                time.sleep(_LOOK_S)

    def list_files(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Reply with the artifacts of a run and a digest of the list; null if the client knows this list."""
        listed = list_artifacts(self._model_dir(fields["name"]))
        digest = digest_of(listed)
        records = None if digest == fields["known"] else [each.to_record() for each in listed]
        return Frame({"answer": {"digest": digest, "artifacts": records}})

    def read(self, fields: Mapping[str, Any], body: bytes) -> Frame:
        """Reply with a block of an artifact and its SHA-256."""
        artifact = Artifact.from_record(fields["artifact"])
        folder = self._model_dir(fields["name"])
        state, data = read_block(folder, artifact, fields["position"], fields["known"])
        return Frame({"answer": state, "digest": hashlib.sha256(data).hexdigest()}, data)

    def _model_dir(self, name: str) -> Path:
        with self._opened() as queue:
            job = queue.show(name)
        if job.model_dir is None:
            raise QueueError(
                f"job {job.name} has no model_dir, so it has no artifacts",
                remedy="follow the job with --artifacts none",
            )
        return job.model_dir

    @contextmanager
    def _opened(self) -> Iterator[Queue]:
        # A connection opens the queue only once, because that reads the file system and the environment.
        self._queue = self._queue or open_queue()
        yield self._queue


def _check_texts(fields: Mapping[str, Any], where: str) -> None:
    """Raise `QueueError` if a list that must have strings has other values."""
    for name in _LISTS_OF_TEXTS & fields.keys():
        if not all(isinstance(item, str) for item in fields[name]):
            raise QueueError(
                f"expected a list of strings for {name!r}, got other values", where=where, remedy=SAME_VERSION
            )


def job_environment(own: Mapping[str, str], python_paths: Sequence[Path]) -> dict[str, str]:
    """Return the environment variables of a job that a client submits.

    Args:
        own: the environment of the server, which is that of a login over SSH.
        python_paths: folders from which the job imports modules, besides those of PYTHONPATH.
    """
    kept = {name: value for name, value in own.items() if not name.startswith(_UNSAFE)}
    # This folder comes first, so that `python` in a command means the one that has Headwater.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    paths = [*map(str, python_paths), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)} if paths else kept


_MAYBE_TEXT = (str, type(None))
_HANDLERS: dict[str, tuple[dict[str, tuple[type, ...]], _Handler]] = {
    "begin": ({"path": _MAYBE_TEXT}, Server.begin),
    "ping": ({}, Server.ping),
    "queue": ({"request": (dict,)}, Server.forward),
    "find": ({"digests": (list,)}, Server.find),
    "add": ({"digest": _TEXT, "size": _NUMBER, "position": _NUMBER}, Server.add),
    "submit": (
        {
            "token": _TEXT,
            "command": (list,),
            "is_headwater": (bool,),
            "files": (list,),
            "python_paths": (list,),
            "run": _MAYBE_TEXT,
            "only_reads": (bool,),
            "origin": (dict,),
            "num_csx": _NUMBER,
            "priority": _TEXT,
            "labels": (dict,),
            "umask": _NUMBER,
        },
        Server.submit,
    ),
    "watch": (
        {"name": _TEXT, "position": _NUMBER, "phase": _MAYBE_TEXT, "wait_s": (int, float)},
        Server.watch,
    ),
    "list": ({"name": _TEXT, "known": _MAYBE_TEXT}, Server.list_files),
    "read": ({"name": _TEXT, "artifact": (dict,), "position": _NUMBER, "known": _MAYBE_TEXT}, Server.read),
}
"""Kind of request -> its fields with their types, and the method that answers it."""
