"""The model's buffers: they stay on the device, and keep their values if a step fails.

So do the objects that a class of parameters keeps at its parameters, such as the scales of quantized weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from headwater.core.effects import attributes_of_parameter
from headwater.core.errors import StreamError
from headwater.core.module_parameters import parameters_of


class Buffers:
    """Moves the buffers of a model to the device, and can restore their values.

    Args:
        model: the model.
        device: the device that computes.

    Raises:
        StreamError: if a buffer has no values.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise StreamError(
                    f"buffer {name!r} is on the meta device and has no values",
                    remedy="create it on the CPU, or register it in the forward",
                )
        self.move(device)

    def move(self, device: torch.device) -> None:
        """Move the buffers, and objects at parameters, to a device. A buffer with several names stays one."""
        # The entries keep the old buffers, because another tensor could get the identity of a freed one.
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            _, there = moved.setdefault(id(buffer), (buffer, buffer.to(device)))
            self._set(name, there)
        for param in parameters_of(self._model):
            _move_attributes(param, device)

    def _set(self, name: str, buffer: torch.Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        self._model.get_submodule(path)._buffers[leaf] = buffer

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present values of the buffers."""
        buffers = self._model.named_buffers(remove_duplicate=False)
        before = [(name, buffer, buffer.clone()) for name, buffer in buffers]
        return lambda: self._put_back(before)

    def _put_back(self, before: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, buffer, value in before:
                buffer.copy_(value)
                # The forward may have put another tensor in its place.
                self._set(name, buffer)


def _move_attributes(param: nn.Parameter, device: torch.device) -> None:
    """Move what `model.to(device)` moves beside the values of a parameter, if its class has its own `to`.

    `Params4bit` of bitsandbytes keeps the scales of its numbers in such an attribute.
    """
    home = getattr(param, "home", None)
    kind = type(param) if home is None else home.kind
    if kind.to is torch.Tensor.to:
        return
    for name, value in attributes_of_parameter(vars(param)).items():
        if hasattr(value, "to") and not isinstance(value, nn.Module):
            moved = value.to(device)
            if moved is not None:  # some methods `to` move the object itself
                vars(param)[name] = moved
