"""Files of measurements of this machine, in the cache folder of the user."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headwater.core.attention import attention_kernel_available
from headwater.core.cleanup import on_failure
from headwater.core.scratch import cache_folder
from headwater.core.warn_once import warn_once

logger = logging.getLogger(__name__)


def cache_file(name: str) -> Path | None:
    """Return the path of a file in the cache folder; `None` for a user without a home."""
    folder = cache_folder()
    return None if folder is None else folder / name


def machine_key(device: str, folder: Path | None = None) -> str:
    """Return the name of this machine with everything that its speed depends on.

    Args:
        device: `cpu` or `cuda`.
        folder: an existing folder of the disk tier, if there is one.
    """
    gpu = "" if device == "cpu" else torch.cuda.get_device_name(device)
    kernel = "attention kernel" if device == "cpu" and attention_kernel_available() else "torch's attention"
    # The rates depend on all of these. Several machines may have the same home folder, hence the node.
    parts = (platform.node(), _cpu_model(), torch.__version__, torch.get_num_threads(), device, gpu, kernel)
    return "|".join(map(str, (*parts, _mount_point(folder) if folder else "")))


def _cpu_model() -> str:
    # On Linux `platform.processor` does not name the model.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _mount_point(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_mount())


def read_entries(cache: Path | None) -> dict[str, Any]:
    """Return the entries of a file by key; nothing if it cannot be read or is damaged."""
    if cache is None:
        return {}
    try:
        entries = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_entries(cache: Path | None, entries: Mapping[str, Any], *, what: str) -> None:
    """Replace a file by these entries. If it cannot be written, log a warning.

    Args:
        cache: the file; nothing is written if `None`.
        entries: JSON values by key.
        what: the entries in words, for the warning.
    """
    if cache is None:
        return
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=cache.parent)
        with on_failure(lambda: Path(name).unlink(missing_ok=True)):
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(entries, indent=1))
            # Other processes may read the file now: they find the old content or the new one.
            Path(name).replace(cache)
    except OSError as error:
        warn_once(
            logger,
            "%s cannot be stored: %s: %s; set XDG_CACHE_HOME to a folder that can be written to",
            what,
            cache,
            error.strerror,
        )
