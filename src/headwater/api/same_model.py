"""Check that all ranks have the same model before they plan for it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from headwater.core.errors import StreamError
from headwater.fabric.fabric import Fabric


def check_same_model(fabric: Fabric, model: nn.Module, kept: Collection[str]) -> None:
    """Check that the modules and parameters of a model are those of every other rank. All ranks call this.

    Args:
        fabric: the ranks.
        model: the model of this rank.
        kept: names of the parameters that are streamed already.

    Raises:
        StreamError: on every rank, if the models differ.
    """
    first, *others = fabric.gather_objects(_parts(model, kept), dict[str, str])
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            expected, found = first.get(name, "nothing"), other.get(name, "nothing")
            if expected != found:
                raise StreamError(
                    f"expected the same model on all ranks, found a difference at {name or 'the model'}: "
                    f"rank 0 has {expected}, rank {rank} has {found}",
                    where=type(model).__name__,
                    remedy="make the same changes to the model on every rank",
                )


def _parts(model: nn.Module, kept: Collection[str]) -> dict[str, str]:
    """Return a description of each module and each parameter, by name."""
    parts = {name: f"a module {type(module).__qualname__}" for name, module in model.named_modules()}
    for name, param in model.named_parameters():
        state = "streamed" if name in kept else "new"
        trained = "trained" if param.requires_grad else "frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        parts[name] = f"a {state}, {trained} parameter {list(param.shape)} {dtype}"
    return parts
