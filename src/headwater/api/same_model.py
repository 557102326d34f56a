"""Checks that all ranks have the same model, and step optimizers with the same options."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.module_parameters import named_parameters_of
from headwater.fabric.fabric import Fabric
from headwater.optim.spec import group_options, numbers


def check_same_model(fabric: Fabric, model: nn.Module, kept: Collection[str]) -> None:
    """Check that all ranks have a model with the same modules and parameters. All ranks call this.

    Args:
        fabric: the ranks.
        model: the model of this rank.
        kept: names of the parameters that are streamed already.

    Raises:
        StreamError: on every rank, if the models differ.
    """
    difference = _difference(fabric.gather_objects(_parts(model, kept), dict[str, str]))
    if difference is not None:
        raise StreamError(
            f"expected the same model on all ranks, found a difference at {difference}",
            where=type(model).__name__,
            remedy="make the same changes to the model on every rank",
        )


def check_same_trained(
    fabric: Fabric, model: nn.Module, trained: Collection[str], kept: Collection[str]
) -> None:
    """Check that every rank trains the same parameters. All ranks call this.

    Ranks compare a checksum of the names. They compare the models only if the checksums differ.

    Args:
        fabric: the ranks.
        model: the model of this rank.
        trained: names of the parameters that require a gradient.
        kept: names of the parameters that are streamed already.

    Raises:
        StreamError: on every rank, if the models differ.
    """
    # One number is exchanged much faster than all names.
    if _is_same(fabric, sorted(trained), "the model to be called"):
        return
    check_same_model(fabric, model, kept)


def check_same_options(
    fabric: Fabric, optimizer: torch.optim.Optimizer, names: Mapping[int, str], asked: Mapping[str, object]
) -> None:
    """Check that every rank updates the same parameters with the same options. All ranks call this.

    Args:
        fabric: the ranks.
        optimizer: the optimizer of this rank that is about to step.
        names: the name of each streamed parameter, by identity.
        asked: further options of this step.

    Raises:
        StreamError: on every rank, if the options differ.
    """
    told = {key: repr(value) for key, value in asked.items()}
    for index, group in enumerate(optimizer.param_groups):
        place = f"parameter group {index}"
        options = group_options(optimizer, group)
        told |= {f"{key} of {place}": repr(numbers(value)) for key, value in options.items()}
        # A checksum of the names is needed too: ranks may have groups of equal size with other parameters.
        own = [names[id(param)] for param in group["params"] if id(param) in names]
        told[f"the parameters of {place}"] = f"{len(own)} with the checksum {_checksum(own):08x}"
    if _is_same(fabric, sorted(told.items()), "the step of an optimizer"):
        return
    difference = _difference(fabric.gather_objects(told, dict[str, str]))
    if difference is not None:
        raise StreamError(
            f"expected the same options on all ranks, found a difference at {difference}",
            where=f"{type(optimizer).__name__}.step()",
            remedy="set the same options on every rank; if a learning rate depends on a loss, take the loss "
            "of the whole batch (headwater.step_closure)",
        )


def _is_same(fabric: Fabric, value: Sequence[object], what: str) -> bool:
    """True if `value` is the same on every rank. All ranks call this. For `what` see `Fabric`."""
    # A checksum has 32 bits, so a float represents it exactly.
    return len(set(fabric.gather(float(_checksum(value)), what))) == 1


def _checksum(value: Sequence[object]) -> int:
    return zlib.crc32(repr(value).encode())


def _difference(every: Sequence[Mapping[str, str]]) -> str | None:
    """Return the first name whose descriptions differ between ranks, with two of them, or `None`."""
    first, *others = every
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            expected, found = first.get(name, "nothing"), other.get(name, "nothing")
            if expected != found:
                return f"{name or 'the model'}: rank 0 has {expected}, rank {rank} has {found}"
    return None


def _parts(model: nn.Module, kept: Collection[str]) -> dict[str, str]:
    """Return a description of each module and each parameter, by name."""
    parts = {name: f"a module {type(module).__qualname__}" for name, module in model.named_modules()}
    for name, param in named_parameters_of(model):
        state = "streamed" if name in kept else "new"
        trained = "trained" if param.requires_grad else "frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        parts[name] = f"a {state}, {trained} parameter {list(param.shape)} {dtype}"
    return parts
