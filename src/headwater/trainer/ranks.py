"""Runs of params on several compute ranks: how they start, and what they cannot do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import headwater
from headwater.api.ranks import refuse
from headwater.config.run import RunConfig, SetupConfig
from headwater.core.errors import ConfigError
from headwater.core.placement import Placement
from headwater.fabric.fabric import Fabric
from headwater.fabric.membership import is_rank, join
from headwater.fabric.report import report
from headwater.plan.types import Plan
from headwater.trainer.job import Trainable
from headwater.trainer.run_dir import given_params

__all__ = [
    "check_alike",
    "check_number",
    "check_ranks",
    "is_rank",
    "join",
    "launch",
    "program_and_params",
    "report",
]

_PACKAGE = Path(headwater.__file__).parent
_KEY = "trainer.init.backend.cluster_config.num_csx"
_MEMX = "trainer.init.backend.cluster_config.num_memx"


def launch(placement: Placement, arguments: Sequence[str]) -> int:
    """Run a command of this program as several ranks on this machine; returns its exit code.

    Args:
        placement: how many.
        arguments: of the command line.

    Raises:
        ConfigError: if there are not so many cores.
        HeadwaterError: what the first rank that failed has met.
    """
    from headwater.fabric.launch import launch as launch_ranks  # it takes a while to import

    return launch_ranks(placement, ("-m", "headwater", *arguments), where=_KEY)


def check_ranks(init: SetupConfig, trainable: Trainable, plan: Plan, fabric: Fabric) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: if that is asked for.
    """
    if fabric.size == 1:
        return
    refused = {
        "gradients on disk": plan.gradient_tier == "disk",
        "the disk tier on several hosts": plan.tier == "disk" and fabric.num_hosts > 1,
        "sparsity in the disk tier": bool(init.sparsity) and plan.tier == "disk",
        "sparsity over several hosts": bool(init.sparsity) and fabric.num_hosts > 1,
        "weights that follow others": bool(trainable.averages),
        "an accelerator": plan.device != "cpu",
    }
    refuse([what for what, is_asked in refused.items() if is_asked], where=_KEY)
    if plan.tier == "disk" and fabric.placement.num_memx:
        raise ConfigError(
            "store ranks keep weights in memory, and the plan puts them on disk",
            where=_MEMX,
            remedy="write num_memx: 0, or let the run take more memory",
        )


def check_alike(fabric: Fabric, told: Mapping[str, str]) -> None:
    """Refuse ranks that are not of the same run.

    Args:
        fabric: the ranks.
        told: by name, what this one would do it with.

    Raises:
        ConfigError: if another rank would do it with something else.
    """
    first, *others = fabric.gather_objects(dict(told))
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank} has another {name} than rank 0: {other.get(name)}, and {first.get(name)}",
                    remedy="start the same command with the same files on every host",
                )


def program_and_params(config: RunConfig) -> dict[str, str]:
    """What ranks must have in common before they do anything together."""
    files = sorted(_PACKAGE.rglob("*.py"))
    code = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=6).hexdigest()
    versions = {
        "version of Headwater": f"{headwater.__version__} ({code})",
        "version of torch": torch.__version__,
    }
    return versions | dict(_keys_of(given_params(config)))


def _keys_of(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every key and value; files may lie elsewhere on another host."""
    if isinstance(tree, dict | list | tuple) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _keys_of(value, f"{name}.{key}" if name else str(key))
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
    raise ConfigError(f"{asked}, and there is {fabric.size}", where=_KEY, remedy=remedy)
