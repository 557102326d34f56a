"""What ends a rank, told its launcher in a file, so that it is said once for all ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError, error_class

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def report(error: HeadwaterError) -> bool:
    """Tell the launcher of this rank what went wrong; whether there is one."""
    told = {"kind": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy}
    return _write(str(error), told)


def report_traceback(text: str) -> bool:
    """Tell the launcher of this rank with which traceback its script has ended; whether there is one."""
    return _write(text, {"traceback": text})


def _write(text: str, told: dict[str, Any]) -> bool:
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    now = time.time()
    message = {"message": text, "extraInfo": {"timestamp": int(now), "headwater": {**told, "time_s": now}}}
    try:
        Path(path).write_text(json.dumps({"message": message}))
    except OSError:  # no room, say, which may be what is to be told: then it is said here
        return False
    return True


def read_report(path: str) -> dict[str, Any]:
    """What a rank has told: a `traceback`, or what an error holds, and `time_s`; empty if nothing."""
    try:
        told: dict[str, Any] = json.loads(Path(path).read_text())["message"]["extraInfo"]["headwater"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return told


def told_error(told: dict[str, Any]) -> HeadwaterError:
    """The error that a rank has told."""
    kind = error_class(told["kind"])
    assert kind is not None, f"{told['kind']} is an error of this package: `report` has written it"
    return kind(told["what"], where=told["where"], remedy=told["remedy"])
