"""The files of a profile."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.core.files import disk_errors, replace_file
from headwater.profiler.profile import Profile
from headwater.profiler.summary import Summary, document_of, of_all_ranks
from headwater.profiler.timeline import timeline_png

logger = logging.getLogger(__name__)

PROFILE, TRACE, TIMELINE, OPERATORS = (
    "op_profile.json",
    "chrome_trace.json",
    "timeline.png",
    "operators.txt",
)


def write_profile(
    folder: Path, profile: Profile, summaries: Sequence[Summary], trace: Mapping[str, Any]
) -> None:
    """Write the files of a profile, or warn.

    Args:
        folder: the folder; made if missing.
        profile: the profile of this rank.
        summaries: the times of each rank.
        trace: the trace of all ranks.
    """
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        document = document_of(of_all_ranks(summaries))
        if len(summaries) > 1:
            document["ranks"] = [document_of(summary) for summary in summaries]
        replace_file(folder / PROFILE, json.dumps(document, indent=1).encode())
        replace_file(folder / TRACE, json.dumps(trace).encode())
        if profile.operators is not None:
            replace_file(folder / OPERATORS, profile.operators.encode())
        if importlib.util.find_spec("matplotlib") is None:
            logger.info(
                "matplotlib is not installed: %s is left out (pip install 'headwater[plot]')", TIMELINE
            )
        else:
            replace_file(folder / TIMELINE, timeline_png(profile))
        logger.info("profile: %s", folder)
    except (HeadwaterError, ImportError, ValueError, ArithmeticError) as error:
        logger.warning("the profile was not written; the training is not affected: %s", error)
