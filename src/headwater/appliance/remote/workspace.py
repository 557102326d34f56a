"""The folder of an appliance for one user: contents of files, folders of jobs, and folders of runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from headwater.appliance.remote.contents import Contents
from headwater.appliance.types import SAME_VERSION, Job, read_fields
from headwater.core.errors import QueueError
from headwater.core.files import disk_errors, make_folder

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_FILE = {"path": (str,), "digest": (str,), "executable": (bool,)}
_ORIGIN = "origin.json"
MODEL_DIR = "{model_dir}"
"""In a word of a command, this text stands for the folder of the run on the appliance."""
MAX_FILES = 20_000
"""Most files of one submission."""


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The paths of a workspace.

    Attributes:
        path: its folder, absolute.
    """

    path: Path

    @property
    def contents(self) -> Contents:
        """The contents of files that clients have sent."""
        return Contents(self.path / "contents")

    def create(self) -> None:
        """Create the folder for this user alone, if it does not exist.

        Raises:
            StoreError: if it cannot be created.
        """
        with disk_errors(self.path):
            make_folder(self.path.parent)
            self.path.mkdir(mode=0o700, exist_ok=True)

    def run(self, name: str) -> Path:
        """Return the folder of a run, the model_dir of its jobs.

        Raises:
            QueueError: if `name` is not the name of a folder.
        """
        return self.path / "runs" / _checked(name)

    def job(self, token: str) -> Path:
        """Return the working folder of the job with this token.

        Raises:
            QueueError: if `token` is not the name of a folder.
        """
        return self.path / "jobs" / _checked(token) / "files"

    def lay_out(self, token: str, files: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> Path:
        """Create the working folder of a job from contents, and return it. If it exists, leave it as it is.

        Args:
            token: the token of the submission.
            files: for each file its `path` in the folder, the `digest` of its content, and `executable`.
            origin: facts of the client, which `origin` returns.

        Raises:
            QueueError: if a path leads out of the folder, or a content is missing.
            StoreError: if files cannot be written.
        """
        folder = self.job(token)
        if folder.is_dir():
            return folder
        if len(files) > MAX_FILES:
            raise QueueError(
                f"expected at most {MAX_FILES} files in a submission, got {len(files)}",
                remedy="send fewer files, or copy the data to the appliance first",
            )
        # The folder has another name until it is complete: another connection may lay out the same job.
        partial = folder.parent.with_name(f"{uuid.uuid4().hex}.partial")
        try:
            with disk_errors(folder):
                (partial / folder.name).mkdir(parents=True)
                for each in files:
                    self._copy(read_fields(each, _FILE, "a file of the submission"), partial / folder.name)
                (partial / _ORIGIN).write_text(json.dumps(dict(origin)))
                try:
                    partial.rename(folder.parent)
                except OSError:
                    if not folder.is_dir():  # if it is one, another connection was faster
                        raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # does nothing after the rename
        return folder

    def origin(self, job: Job) -> dict[str, Any]:
        """Return the facts of the client that has submitted a job; empty if the job came another way."""
        try:
            found = json.loads((job.folder.parent / _ORIGIN).read_text())
        except (OSError, ValueError):
            return {}
        is_ours = job.folder.parent.parent == self.path / "jobs"
        return found if is_ours and isinstance(found, dict) else {}

    def _copy(self, file: Mapping[str, Any], folder: Path) -> None:
        relative = PurePosixPath(file["path"])
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise QueueError(
                f"expected a path inside of the job's folder, got {file['path']!r}",
                where="a file of the submission",
                remedy=SAME_VERSION,
            )
        source = self.contents.path(file["digest"])
        if not source.exists():
            raise QueueError(f"the content of {file['path']} is missing", remedy="submit again")
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        # The content is copied and not linked, because the job may change its file.
        shutil.copyfile(source, target)
        target.chmod(0o755 if file["executable"] else 0o644)


def find_workspace(path: str | None) -> Workspace:
    """Return the workspace at `path`, or this user's usual one."""
    if path is not None:
        return Workspace(Path(path).expanduser().absolute())
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Workspace(Path(state) / "headwater" / "appliance")


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise QueueError(
            f"expected a name of at most 201 letters, digits, '.', '_' and '-', got {name!r}",
            where="name of a run, or token of a submission",
            remedy=SAME_VERSION,
        )
    return name
