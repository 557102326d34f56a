"""Plans under which a model is compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headwater.core.errors import ConfigError, HeadwaterError

Result = TypeVar("Result")

PLANS: Mapping[str, Mapping[str, Any]] = {
    "memory": {},
    "slabs": {"tier": "memory", "num_slabs": 2},
    "recompute": {"tier": "memory", "num_slabs": 2, "activations": "recompute"},
    "selective": {"tier": "memory", "num_slabs": 2, "activations": "selective"},
    "disk": {"tier": "disk", "num_slabs": 2},
    "disk_recompute": {
        "tier": "disk",
        "gradient_tier": "disk",
        "num_slabs": 2,
        "activations": "recompute",
    },
    "mixed": {"tier": "disk", "num_slabs": 2, "stages_in_memory": 2},
    "offload": {"tier": "memory", "num_slabs": 2, "activations": "offload"},
}
"""Name of a plan -> the options of `headwater.backend` that ask for it, without the folder on disk."""

_SLABS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128)


def needs_disk(name: str) -> bool:
    """True if a plan needs a folder for the disk tier or for activations."""
    options = PLANS[name]
    return options.get("tier") == "disk" or options.get("activations") == "offload"


def with_enough_slabs(name: str, folder: Path, run: Callable[[Mapping[str, Any]], Result]) -> Result:
    """Return the result of `run` with the options of a plan, and with the fewest slabs that are accepted.

    Args:
        name: name of the plan.
        folder: folder of the disk tier.
        run: a function that trains with the options of a backend.

    Raises:
        HeadwaterError: if the plan is refused for another reason than too few slabs, or with every number of
            slabs that is tried.
    """
    options = dict(PLANS[name])
    if needs_disk(name):
        options["disk"] = str(folder)
    if "num_slabs" not in options:
        return run(options)
    for slabs in _SLABS:
        try:
            return run({**options, "num_slabs": slabs})
        except HeadwaterError as error:
            if slabs == _SLABS[-1] or not _asks_for_slabs(error):
                raise
    raise AssertionError("the last number of slabs returns or raises")


def _asks_for_slabs(error: HeadwaterError) -> bool:
    """True if an error asks for a larger number of slabs."""
    too_few = isinstance(error, ConfigError) and error.where == "num_slabs"
    return too_few or (error.remedy is not None and "more slabs" in error.remedy)
