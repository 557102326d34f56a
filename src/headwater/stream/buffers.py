"""The model's buffers: they stay on the device, and keep their values if a step fails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from headwater.core.errors import StreamError


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
        """Move the buffers to a device. A buffer that has several names stays one tensor."""
        # The entries keep the old buffers, because another tensor could get the identity of a freed one.
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            _, there = moved.setdefault(id(buffer), (buffer, buffer.to(device)))
            self._set(name, there)

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
