"""Arguments of operators in a dry run, which is in host memory even if the model computes on a GPU.

[Note: forwards that name the GPU]
The batch, weights and buffers of a dry run are in host memory. But a forward may name the GPU in its code
(`torch.arange(length, device="cuda")`), and modules may have tensors there as plain attributes. Operators of
tensors on two devices would fail. So the operators of a dry run make their tensors in host memory, and get
tensors of a GPU as copies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from headwater.core.trees import operands

_HERE = torch.device("cpu")


@final
class HostArguments:
    """Moves the arguments of operators to host memory; see [Note: forwards that name the GPU].

    Args:
        copy: returns a tensor of the dry run that stands for one of a GPU.
    """

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copy = copy
        # A forward may write to a tensor and read it later, so it gets the same copy each time. The original
        # is kept, so that no other tensor can get its identity.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an operator, with each device and tensor of a GPU replaced."""
        if _is_elsewhere(kwargs.get("device")):
            kwargs = {**kwargs, "device": _HERE}
        if _is_elsewhere(getattr(kwargs.get("generator"), "device", None)):
            kwargs = {**kwargs, "generator": None}
        if any(map(_is_there, operands((*args, *kwargs.values())))):
            args, kwargs = tree_map_only(torch.Tensor, self._here, (args, kwargs))
        return args, kwargs

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_there(tensor):
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, self._copy(tensor)
        return self._copies[id(tensor)][1]


def _is_there(tensor: torch.Tensor) -> bool:
    """True for a tensor of a GPU. The dry run itself makes none."""
    return not isinstance(tensor, FakeTensor) and _is_elsewhere(tensor.device)


def _is_elsewhere(device: torch.device | None) -> bool:
    return device is not None and device.type not in ("cpu", "meta")
