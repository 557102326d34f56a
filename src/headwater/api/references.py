"""Warnings of tensors that share memory with a parameter when streaming of its weights begins.

In plain PyTorch `weight.detach()` shares the memory of the weight. Streaming moves the weight to the store,
so a tensor that was made from it before keeps the values of that moment.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from headwater.plan.alive import has_storage

_SHOWN = 3
"""Maximum number of parameter names in one warning."""


class StaleTensorWarning(UserWarning):
    """Warns of a tensor that shared memory with a parameter. It keeps the old values from now on."""


def warn_of_references(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Warn of tensors that share memory with parameters which are about to be streamed.

    Args:
        params: names and parameters that still have their values in memory.
    """
    params = list(params)
    known = {id(param) for _, param in params}
    names = {address: name for name, param in params if (address := _address(param)) is not None}
    # First without a collection, which takes long in a large program and is rarely needed.
    if not _shared(names, known):
        return
    gc.collect()  # unreachable tensors need no warning
    found = _shared(names, known)
    if not found:
        return
    first = [name for name in names.values() if name in found]
    more = f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    warnings.warn(
        f"a tensor that was made of {', '.join(first[:_SHOWN])}{more} before the first forward keeps its "
        "present values, because streaming moves the weights; make it after the first forward "
        "(parameter.detach()), or clone() it if it is to keep the values",
        StaleTensorWarning,
        stacklevel=2,
    )


def _shared(names: Mapping[int, str], known: Collection[int]) -> set[str]:
    """Return the names of the parameters that share their address with another tensor.

    Args:
        names: address -> name of the parameter.
        known: identities of the parameters.
    """
    outside = (_address(tensor) for tensor in _tensors() if id(tensor) not in known)
    return {names[address] for address in outside if address is not None and address in names}


def _tensors() -> Iterable[torch.Tensor]:
    """Return every `torch.Tensor` and `nn.Parameter` of this process, but no object of a subclass."""
    return (each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory; `None` for a tensor without memory."""
    if not has_storage(tensor) or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage().data_ptr() or None
