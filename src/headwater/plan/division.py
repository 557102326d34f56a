"""Division of stages that are too large for every plan: the large modules inside a block become stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from headwater.core.stage import ParamSpec, StageSpec
from headwater.plan.partition import Partition, Unit

_ROUNDS = 6
"""Rounds of division. Each halves the limit on the size of a stage, down to 1/64 of the largest stage."""
_SMALL_SHARE = 32
"""The smallest parameters of a block stay together, up to 1/32 of the block."""
_WHOLE = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Layers that are never divided: in evaluation they have a fast path, which reads all of their weights."""


class _Part(NamedTuple):
    """Parameters of a divided stage that become a stage, and their module."""

    unit: Unit
    params: tuple[ParamSpec, ...]


def divisions(model: nn.Module, partition: Partition) -> Iterator[Partition]:
    """Yield partitions with ever smaller stages, until no stage can be divided.

    The largest stages are divided first. Each round halves the limit on the size of a stage, and divides the
    stages above the limit. A matrix is never divided, since that would change the order of sums in backward.

    Args:
        model: the model; its parameters may be on the meta device.
        partition: its stages, without divided blocks.
    """
    largest = max(stage.slab_bytes for stage in partition.stages)
    before = partition
    for round_ in range(1, _ROUNDS + 1):
        finer = divide(model, partition, largest >> round_)
        if finer != before:
            yield finer
            before = finer


def divide(model: nn.Module, partition: Partition, most_bytes: int) -> Partition:
    """Return a partition in which every stage that is larger than `most_bytes` is divided at its modules.

    A module inside the stage is a stage if it has at most `most_bytes`. A larger one is divided at its
    children, and its own parameters are a stage. Norms, biases and other small parameters are not worth a
    stage: together with the block's own parameters they stay in the stage of the block, which comes last
    and is bound while the block runs.

    Args:
        model: the model.
        partition: its stages, without divided blocks.
        most_bytes: size of a stage in wire precision that needs no division.

    Returns:
        The stages; `StageSpec.part_of` tells which of them are parts of a block.
    """
    stages: list[StageSpec] = []
    units: list[Unit] = []
    for stage, unit in zip(partition.stages, partition.units, strict=True):
        parts, rest = _parts(model, stage, unit, most_bytes)
        # If the block has no small parameters, no stage encloses its parts.
        around = len(stages) + len(parts) if parts and rest else None
        for part in parts:
            stages.append(StageSpec(len(stages), part.unit.path, part.params, around))
            units.append(part.unit)
        if rest:
            stages.append(dataclasses.replace(stage, index=len(stages), params=rest))
            units.append(unit)
    return Partition(tuple(stages), tuple(units))


def _parts(
    model: nn.Module, stage: StageSpec, unit: Unit, most_bytes: int
) -> tuple[list[_Part], tuple[ParamSpec, ...]]:
    """Return the parts of a stage, and the parameters that remain; no parts if it is not divided."""
    is_whole = unit.direct_only or isinstance(model.get_submodule(unit.path), _WHOLE)
    if is_whole or stage.slab_bytes <= most_bytes:
        return [], stage.params
    small = _smallest(stage.params, stage.slab_bytes // _SMALL_SHARE)
    owned = [(_owner(param, unit.path), param) for param in stage.params if param.name not in small]
    parts = [part for part in _inside(model, unit.path, owned, most_bytes) if part.unit.path != unit.path]
    taken = {param.name for part in parts for param in part.params}
    rest = tuple(param for param in stage.params if param.name not in taken)
    is_smaller = len(parts) > 1 or any(param.name not in small for param in rest)
    return (parts, rest) if is_smaller else ([], stage.params)


def _smallest(params: Sequence[ParamSpec], most_bytes: int) -> set[str]:
    """Return the names of the smallest parameters that have at most `most_bytes` together."""
    names, total = set(), 0
    # Smallest first, so that as many as possible stay together.
    for param in sorted(params, key=lambda param: param.wire_bytes):
        total += param.wire_bytes
        if total > most_bytes:
            break
        names.add(param.name)
    return names


def _owner(param: ParamSpec, path: str) -> str:
    """Return the path of the module inside `path` that has a parameter, which may have several names."""
    prefix = f"{path}." if path else ""
    name = next(name for name in (param.name, *param.aliases) if name.startswith(prefix))
    return name.rpartition(".")[0]


def _inside(
    model: nn.Module, path: str, owned: Sequence[tuple[str, ParamSpec]], most_bytes: int
) -> Iterator[_Part]:
    """Yield the parts of the module at `path`; its own parameters are one part.

    Args:
        model: the model.
        path: qualified name of the module.
        owned: its parameters, with the path of the module that has each of them.
        most_bytes: size of a part that needs no division.
    """
    own = tuple(param for owner, param in owned if owner == path)
    if own:
        yield _Part(Unit(path, direct_only=len(own) < len(owned)), own)
    prefix = f"{path}." if path else ""
    for name, module in model.get_submodule(path).named_children():
        child = f"{prefix}{name}"
        inside = [(o, param) for o, param in owned if o == child or o.startswith(f"{child}.")]
        is_large = sum(param.wire_bytes for _, param in inside) > most_bytes
        if is_large and not isinstance(module, _WHOLE):
            yield from _inside(model, child, inside, most_bytes)
        elif inside:
            yield _Part(Unit(child, direct_only=False), tuple(param for _, param in inside))
