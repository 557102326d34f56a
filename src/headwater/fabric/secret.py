"""The secret of a run: only processes that know it are accepted as ranks. Nothing here imports torch.

The launcher of ranks on one host makes a new one for each run. Ranks of `torchrun`, `srun` or a user's own
script read it from a variable, or from a file that only their user can read. The first rank makes that file.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from headwater.core.errors import RankError

SECRET = "HEADWATER_SECRET"
"""Environment variable: the secret itself. It is taken out of the environment when it is read."""

SECRET_FILE = "HEADWATER_SECRET_FILE"
"""Environment variable: path of the file with the secret, if it is not the default one."""

_MIN_BYTES, _MAX_BYTES = 16, 4096


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(32)


def take_secret(environment: MutableMapping[str, str]) -> bytes:
    """Return the secret of the run to which this process belongs.

    Args:
        environment: the environment variables of the process.

    Raises:
        RankError: if the secret is missing, or other users can read it.
    """
    # The variable is removed, so that programs which this rank starts do not inherit the secret.
    text = environment.pop(SECRET, None)
    if text is not None:
        return _checked(text.encode(), where=f"environment variable {SECRET}")
    return file_secret(environment)


def file_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret in the file of the user, which is created if it is missing.

    Args:
        environment: the environment variables of the process; they may name another file.

    Raises:
        RankError: if the secret cannot be read, or other users can read it.
    """
    named = environment.get(SECRET_FILE)
    path = Path(named).expanduser() if named else _usual_file(environment)
    try:
        _create(path)
        return _read(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise RankError(
            f"the secret of the ranks cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy=f"set {SECRET_FILE} to a file that all ranks read, or {SECRET} to a text for all",
        ) from error


def _usual_file(environment: Mapping[str, str]) -> Path:
    root = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "/")) / ".config"
    return Path(root) / "headwater" / "ranks.secret"


def _create(path: Path) -> None:
    """Create the file unless it exists. If several processes try this at once, one of them succeeds."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, new_secret().encode())
        # Without this, a loss of power could leave an empty file.
        os.fsync(file)
        # A rename instead would replace the secret that another process has just made.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        os.close(file)
        partial.unlink()


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        # The open file is checked, because another file could take its name before the read.
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise RankError(
                f"expected a file of this user (uid {os.geteuid()}) with mode 600, "
                f"got uid {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}",
                where=str(path),
                remedy=f"chmod 600 the file, or delete it, or set {SECRET_FILE}",
            )
        return _checked(os.read(file, _MAX_BYTES + 1), where=str(path))
    finally:
        os.close(file)


def _checked(text: bytes, *, where: str) -> bytes:
    text = text.strip()
    if not _MIN_BYTES <= len(text) <= _MAX_BYTES:
        raise RankError(
            f"expected a secret of {_MIN_BYTES} to {_MAX_BYTES} bytes, got {len(text)}",
            where=where,
            remedy="write the output of: openssl rand -hex 32",
        )
    return text
