"""Runs of params on several compute ranks: how they start, and what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headwater.config.run import RunConfig, SetupConfig
from headwater.core.errors import ConfigError
from headwater.core.placement import Placement
from headwater.fabric.alike import check_alike, program
from headwater.fabric.fabric import Fabric
from headwater.fabric.launch import become_launcher
from headwater.fabric.launch import launch as launch_here
from headwater.fabric.membership import is_watched, join
from headwater.fabric.report import report
from headwater.trainer.run_dir import given_params

__all__ = [
    "NUM_CSX",
    "check_alike",
    "check_number",
    "is_watched",
    "join",
    "launch",
    "program_and_params",
    "report",
]

NUM_CSX = "trainer.init.backend.cluster_config.num_csx"
"""The key of the number of compute ranks; for errors."""


def launch(placement: Placement, command: Sequence[str], *, max_restarts: int, in_place: bool) -> int:
    """Run a command of Python as ranks on this machine; returns its exit code.

    Args:
        placement: how many.
        command: what follows the interpreter.
        max_restarts: how often all are started again when one is gone.
        in_place: whether this process has nothing else to do, and ends with them.

    Raises:
        ConfigError: if there are not so many cores.
        HeadwaterError: what the first rank that failed has met.
    """
    start = become_launcher if in_place else launch_here
    return start(placement, command, where=NUM_CSX, max_restarts=max_restarts)


def program_and_params(config: RunConfig) -> dict[str, str]:
    """What ranks must have in common before they do anything together."""
    return program() | dict(keys_of(given_params(config)))


def keys_of(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every key and value; files may lie elsewhere on another host."""
    if isinstance(tree, dict | list | tuple) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from keys_of(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, "a path" if isinstance(tree, Path) else str(tree)


def check_number(init: SetupConfig, fabric: Fabric) -> None:
    """Refuse to train on another number of ranks than the params ask for.

    Raises:
        ConfigError: if it is another one.
    """
    placement = init.backend.placement
    if placement.size == fabric.size:
        return
    asked = f"num_csx is {placement.num_csx}"
    if placement.num_memx:
        asked += f" and num_memx {placement.num_memx}"
    remedy = f"write {fabric.size - placement.num_memx}"
    if placement.num_memx and not fabric.placement.num_memx:
        remedy = "write num_memx: 0; store ranks are for `headwater fit`"
    if fabric.size == 1:
        remedy = "write 1, or start it with `headwater fit`, which trains models of the package on several"
    there = "there is 1 rank" if fabric.size == 1 else f"there are {fabric.size} ranks"
    raise ConfigError(f"{asked}, and {there}", where=NUM_CSX, remedy=remedy)
