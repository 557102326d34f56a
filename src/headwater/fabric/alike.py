"""Whether ranks are of the same run: each tells what it was started with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from headwater.core.errors import ConfigError
from headwater.core.version import __version__
from headwater.fabric.fabric import Fabric

_PACKAGE = Path(__file__).parents[1]


def check_alike(fabric: Fabric, told: Mapping[str, str]) -> None:
    """Refuse ranks that are not of the same run.

    Args:
        fabric: the ranks.
        told: by name, what this one would do it with.

    Raises:
        ConfigError: if another rank would do it with something else.
    """
    first, *others = fabric.gather_objects(dict(told), dict[str, str])
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank} has another {name} than rank 0: {other.get(name)}, and {first.get(name)}",
                    remedy="start the same command with the same files on every host",
                )


def program() -> dict[str, str]:
    """The versions of what ranks run."""
    return {
        "version of Headwater": f"{__version__} ({digest(sorted(_PACKAGE.rglob('*.py')))})",
        "version of torch": torch.__version__,
    }


def digest(files: Iterable[Path]) -> str:
    """A short name for what is in files."""
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=6).hexdigest()
