"""Runs of params files on several ranks: starts the ranks, and checks their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.core.placement import Placement
from headwater.fabric.cluster import is_watched
from headwater.fabric.consistency import program
from headwater.fabric.fabric import Fabric
from headwater.fabric.launch.launcher import become_launcher
from headwater.fabric.launch.launcher import launch as launch_here
from headwater.trainer.run_dir import given_params

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig, RunConfig

NUM_CSX = "trainer.init.backend.cluster_config.num_csx"
"""The key of the number of compute ranks, for errors."""


def launch(
    placement: Placement, words: Sequence[str], *, max_restarts: int = 0, in_place: bool
) -> int | None:
    """Run a command line as ranks on this machine, if it needs ranks and this process is not one of them.

    Args:
        placement: number of compute ranks and store ranks.
        words: the command line after `headwater`.
        max_restarts: how many times all ranks are started again after a rank was lost.
        in_place: replace this process by the launcher of the ranks (`exec`); the call then does not return.

    Returns:
        The exit code of the command; `None` if this process itself runs it.

    Raises:
        ConfigError: if this process may use too few cores.
        HeadwaterError: the error of the rank that failed first.
    """
    # A rank has the same command line, so without this check each rank would launch ranks without end.
    if is_watched() or (placement.size == 1 and not max_restarts):
        return None
    start = become_launcher if in_place else launch_here
    # For `-P` see [Note: planted modules].
    command = ("-P", "-m", "headwater", *words)
    return start(placement, command, where=NUM_CSX, max_restarts=max_restarts)


def program_and_params(config: RunConfig) -> dict[str, str]:
    """Return name -> text of everything that must be equal on all ranks: versions and params."""
    return program() | dict(keys_of(given_params(config)))


def keys_of(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key and value. Paths are replaced by one text, because they may differ between hosts."""
    # Empty mappings and lists are yielded too: two ranks may differ only there.
    if isinstance(tree, dict | list | tuple) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from keys_of(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, "a path" if isinstance(tree, Path) else str(tree)


def check_num_ranks(init: CommonInitConfig, fabric: Fabric) -> None:
    """Raise if the number of ranks is not that of the params.

    Raises:
        ConfigError: if the numbers differ.
    """
    placement = init.backend.placement
    if placement.size == fabric.size:
        return
    asked = f"num_csx={placement.num_csx}"
    if placement.num_memx:
        asked += f" and num_memx={placement.num_memx}"
    remedy = f"write {fabric.size - placement.num_memx}"
    if placement.num_memx and not fabric.placement.num_memx:
        remedy = "write num_memx: 0; store ranks are for `headwater fit`"
    if fabric.size == 1:
        remedy = "write 1, or use `headwater fit`, which trains models of the package on several ranks"
    there = "1 rank was started" if fabric.size == 1 else f"{fabric.size} ranks were started"
    raise ConfigError(f"{asked}, but {there}", where=NUM_CSX, remedy=remedy)
