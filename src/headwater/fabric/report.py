"""Error reports: a failing rank writes its error to a file, and the launcher prints it once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError, error_class

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def report(error: HeadwaterError) -> bool:
    """Write an error of this rank to a file for the launcher. Return false if no launcher reads one."""
    content = {"kind": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy}
    return _write(str(error), content)


def report_traceback(text: str) -> bool:
    """Write the traceback that ended this rank's script, as `report` does."""
    return _write(text, {"traceback": text})


def _write(text: str, content: dict[str, Any]) -> bool:
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return False
    now = time.time()
    message = {"message": text, "extraInfo": {"timestamp": int(now), "headwater": {**content, "time_s": now}}}
    try:
        # This is torchrun's format, because torchrun's agent reads the same file.
        Path(path).write_text(json.dumps({"message": message}))
    except OSError:
        # For example, the disk is full, which may be the error to report. Then the rank prints it itself.
        return False
    return True


def read_report(path: str) -> dict[str, Any]:
    """Return the report of a rank: `time_s`, and `traceback` or the error. Empty if it wrote none."""
    try:
        content: dict[str, Any] = json.loads(Path(path).read_text())["message"]["extraInfo"]["headwater"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return content


def reported_error(content: dict[str, Any]) -> HeadwaterError:
    """Return the error that a rank's report describes."""
    kind = error_class(content["kind"])
    assert kind is not None, f"{content['kind']} is an error of this package: `report` has written it"
    return kind(content["what"], where=content["where"], remedy=content["remedy"])
