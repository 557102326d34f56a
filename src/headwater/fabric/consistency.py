"""Consistency check of ranks: all must run the same program with the same arguments and files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from headwater.core.errors import ConfigError
from headwater.core.version import __version__
from headwater.fabric.fabric import Fabric

_PACKAGE = Path(__file__).parents[1]


def check_consistency(fabric: Fabric, started_with: Mapping[str, str]) -> None:
    """Raise if the ranks were started with different versions, arguments or files.

    Args:
        fabric: the ranks.
        started_with: name -> text, for everything that this rank was started with and that must be equal on
            all ranks.

    Raises:
        ConfigError: if a text differs between rank 0 and another rank.
    """
    # Every rank compares the texts of all ranks. So all ranks raise the error, and no rank waits for another.
    first, *others = fabric.gather_objects(dict(started_with), dict[str, str])
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"{name} differs between ranks: rank 0 has {first.get(name)}, "
                    f"rank {rank} has {other.get(name)}",
                    remedy="start the same command with the same files on every host",
                )


def program() -> dict[str, str]:
    """Return name -> version of Headwater and of torch in this process."""
    return {
        "version of Headwater": f"{__version__} ({digest(sorted(_PACKAGE.rglob('*.py')))})",
        "version of torch": torch.__version__,
    }


def digest(files: Iterable[Path]) -> str:
    """Return a short hash of the contents of files."""
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=6).hexdigest()
