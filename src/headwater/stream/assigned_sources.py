"""Tensors that a script has assigned to `parameter.data`, and that it may change afterwards.

In plain PyTorch the parameter then shares the memory of the tensor. The store has a copy of its values.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, cast

import torch
from torch import nn

from headwater.core.modes import apart_from_modes

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Tensors of other dtypes are not recorded."""


class _Source(NamedTuple):
    """The tensor whose values a parameter got last, as it was then. The values may be a part of it."""

    param: weakref.ref[nn.Parameter]
    tensor: weakref.ref[torch.Tensor]
    version: int
    place: tuple[torch.Size, tuple[int, ...], int]
    sum: float


_sources: dict[int, _Source] = {}
"""Identity of a parameter -> its source."""


def note_source(param: nn.Parameter, value: torch.Tensor) -> None:
    """Record that the values of a tensor were assigned to `param.data`."""
    _sources.pop(id(param), None)
    # Tensors of other classes have no memory, and inference tensors do not count their changes.
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_inference() or value.dtype not in _DTYPES:
        return
    # A view has the version counter of its base, and the script may keep the base alone.
    kept = cast(torch.Tensor, value._base) if value._is_view() else value
    place = value.shape, value.stride(), int(value.storage_offset())
    _sources[id(param)] = _Source(
        weakref.ref(param), weakref.ref(kept), kept._version, place, _sum_at(place, kept)
    )


def changed_sources() -> list[nn.Parameter]:
    """Return the parameters whose assigned values have changed in their tensor since, each once."""
    changed = []
    for key, source in list(_sources.items()):
        param, tensor = source.param(), source.tensor()
        if param is None or tensor is None:
            del _sources[key]
        elif tensor._version != source.version:
            # The version also counts changes of other parts of the tensor.
            if _sum_at(source.place, tensor) == source.sum:
                _sources[key] = source._replace(version=tensor._version)
            else:
                del _sources[key]
                changed.append(param)
    return changed


def _sum_at(place: tuple[torch.Size, tuple[int, ...], int], tensor: torch.Tensor) -> float:
    """Return the sum of the values at a place of a tensor's memory."""
    with apart_from_modes():
        return float(tensor.detach().as_strided(*place).sum(dtype=torch.float64))
