"""Calls of a model by a loop of the user's: what surrounds them, and what stands in for their loss."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from headwater.core.precision import Precision
from headwater.core.seeding import derive_seed, drawing_devices
from headwater.core.trees import tensors_in

_PRECISION_OF = {torch.bfloat16: Precision("bf16"), torch.float16: Precision("fp16")}
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the model."""


def guard_call(
    model: nn.Module, surroundings: Callable[[], AbstractContextManager[None]], clean_up: Callable[[], None]
) -> Callable[[], None]:
    """From now on a call of `model` runs within `surroundings`; `clean_up` is called when it is interrupted.

    No hook of torch runs then.

    Returns:
        What takes that back.
    """
    call: Callable[..., Any] = model._call_impl

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            with surroundings():
                return call(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                clean_up()
            raise

    vars(model)["_call_impl"] = guarded
    return lambda: vars(model).pop("_call_impl", None)


_forwards = itertools.count()


@contextmanager
def own_randomness(rank: int) -> Iterator[None]:
    """Within it a rank of several draws random numbers of its own; outside all draw the same."""
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    with torch.random.fork_rng(devices=drawing_devices()):
        torch.manual_seed(derive_seed(state, next(_forwards), rank))
        yield


def asked_precision(device: str) -> Precision:
    """What autocast asks for: under it weights travel in its dtype."""
    if not torch.is_autocast_enabled(device):
        return Precision()
    return _PRECISION_OF.get(torch.get_autocast_dtype(device), Precision())


def stand_in_loss(model: nn.Module, call: Call) -> torch.Tensor:
    """For the dry run: a loss of whatever the model returns, as expensive as a usual one.

    The user's own is not known before it is called. A scalar is taken for a loss; of anything else the
    cross-entropy over the last dimension is taken, which saves one tensor of its size.
    """
    args, kwargs = call
    outputs = tensors_in(model(*args, **kwargs))
    losses = [_loss_of(output) for output in outputs if output.requires_grad or not torch.is_grad_enabled()]
    return sum(losses, torch.zeros(()))


def _loss_of(output: torch.Tensor) -> torch.Tensor:
    if output.dim() == 0 or not output.is_floating_point():
        return output.float()
    return output.float().log_softmax(-1).sum()
