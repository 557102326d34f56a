"""The files of a profile."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.core.files import check_place, disk_errors, replace_file
from headwater.profiler.chrome import joined_trace, rank_events
from headwater.profiler.profile import Profile, document_of
from headwater.profiler.timeline import timeline_png

logger = logging.getLogger(__name__)

PROFILE, TRACE, TIMELINE, OPERATORS = (
    "op_profile.json",
    "chrome_trace.json",
    "timeline.png",
    "operators.txt",
)


def check_folder(folder: Path) -> None:
    """Check that the folder can be written. Called before a profile begins, so that no profile is lost.

    Raises:
        RunError: if it cannot be written.
    """
    check_place(folder, expected="a folder")


def write_profile(folder: Path, profile: Profile, trace: dict[str, Any] | None = None) -> None:
    """Write the files of a profile, or warn.

    Args:
        folder: the folder; made if missing.
        profile: the profile of this rank.
        trace: the trace of all ranks; that of this rank alone if not given.
    """
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / PROFILE, json.dumps(document_of(profile), indent=1).encode())
        if trace is None:
            trace = joined_trace([rank_events(profile, 1, "Headwater", -profile.spans[0][0])])
        replace_file(folder / TRACE, json.dumps(trace).encode())
        if profile.operators is not None:
            replace_file(folder / OPERATORS, profile.operators.encode())
        if importlib.util.find_spec("matplotlib") is None:
            logger.info(
                "matplotlib is not installed: %s is left out (pip install 'headwater[plot]')", TIMELINE
            )
        else:
            replace_file(folder / TIMELINE, timeline_png(profile))
    except (HeadwaterError, ImportError, ValueError, ArithmeticError) as error:
        logger.warning("the profile was not written; the training is not affected: %s", error)
