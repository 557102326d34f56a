"""Gradients on their way from the device to the store: copied on a stream, and added after the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from headwater.core.cleanup import on_failure
from headwater.core.stage import ParamKey
from headwater.store.gradients.additions import Additions, AdditionThread, LaterAdditions
from headwater.store.gradients.norms import gradient_norm
from headwater.stream.device import Device
from headwater.stream.host_arena import HostArena, InFlight

if TYPE_CHECKING:
    from headwater.store.store import WeightStore


@final
class GradientCopies:
    """Copies gradients to page-locked memory during the computation, and adds them to the store on a thread.

    Gradients of stages on the device stay there: the thread adds them, and only their norms are copied. With
    several ranks all gradients are copied, and autograd's thread itself adds them, some time after it has
    queued their copies. Autograd's thread never waits for a single copy. It blocks only if more bytes wait to
    be added than the gradients of the largest stage have, because these take memory on the device.
    Every use of `store.gradients` first blocks until all gradients are added; see `WeightStore.gradients`.

    Args:
        store: the weight store.
        device: the device on which gradients are computed.
        arena: host memory for gradients until their update.
    """

    def __init__(self, store: WeightStore, device: Device, arena: HostArena) -> None:
        self._store = store
        self._device = device
        self._arena = arena
        self._stream = device.new_stream()
        most = max(sum(p.wire_bytes for p in stage.params) for stage in store.stages)
        self._is_alone = store.fabric.size == 1
        self._additions: Additions = AdditionThread(most) if self._is_alone else LaterAdditions(most)
        self._adding = InFlight(most)
        on_device = (s.index for s in store.stages if store.tier.on_device(s.index) is not None)
        self._staying = set(on_device if self._is_alone else ())  # ranks sum their gradients on the host
        store.await_gradients = self.finish

    def send(self, key: ParamKey, gradient: torch.Tensor, *, last: bool) -> None:
        """Queue the copy of a dense gradient, and its addition to the store; see `WeightStore.add_gradient`.

        Args:
            key: the parameter.
            gradient: the gradient, on the device. The caller must not change it afterwards.
            last: true if no further micro-batch of the step is expected.
        """
        # The norm is computed on the device, which is faster. The store uses it if this is the whole sum.
        sent = [gradient, gradient_norm(gradient)] if last and self._is_alone else [gradient]
        stays = key[0] in self._staying
        received = [source if stays and source is gradient else self._host_memory(source) for source in sent]
        self._stream.wait(self._device.compute.record())
        for target, source in zip(received, sent, strict=True):
            if target is not source:
                self._stream.copy(target, source)
        copied = self._stream.record()

        def add() -> None:
            copied.synchronize()
            # The memory on the device may be used again only from here on.
            sent.clear()
            gradient, *norms = received
            # The list would keep a gradient on the device beside the sum.
            received.clear()
            self._store.add_gradient(key, gradient, last=last, norm=norms[0] if norms else None)
            if stays:
                # The addition may still read the gradient when this function returns.
                self._adding.add(self._device.compute.record(), gradient)

        self._additions.submit(add, gradient.nbytes)
        del gradient
        with on_failure(self._additions.abandon):
            self._additions.drain()

    def _host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory for a copy of a dense tensor, with its shape, strides and dtype."""
        flat = self._arena.lend(like.nbytes).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def end_micro_batch(self) -> None:
        """Queue the call of `WeightStore.end_micro_batch`, after all gradients that were sent before."""
        self._additions.submit(self._store.end_micro_batch, 0)
        if not self._is_alone:
            # Other ranks wait for the gradients of this one.
            self.finish()

    def finish(self) -> None:
        """Block until all gradients that were sent are added. Raise the first error of an addition."""
        # After an error the step has failed: its other gradients must not be added in the next step.
        with on_failure(self._additions.abandon):
            self._additions.finish()
        self._adding.finish()

    def close(self) -> None:
        """Add all gradients that were sent, then end the thread. Raises errors of `finish`."""
        self._store.await_gradients = _nothing
        try:
            self.finish()
        finally:
            # This follows `finish`: to drop an addition earlier would free memory that its copy still uses.
            self._additions.close()


def _nothing() -> None:
    pass
