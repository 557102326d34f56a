"""Hooks for the tensors that autograd saves: set around forwards, and inside the user's own such hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch

from headwater.plan.types import Activations
from headwater.stream.offload import Offload
from headwater.stream.saved_tensors import WeightHandle, are_weights_kept_out, without_weights

if TYPE_CHECKING:
    from headwater.stream.binding import Binder


class Packing:
    """Makes autograd save handles instead of weights, and offloads activations as the plan says.

    Attributes:
        stage: the stage whose forward runs; its policy decides what happens to an activation.

    Args:
        binder: finds the handle of a tensor that is a view of weights.
        stable: true if weights stay in the same memory, so that autograd may save them.
        resolve: returns the weight of a handle.
        policies: the policy for the activations of each stage.
        offload: offloads activations; `None` if the plan offloads none.
    """

    def __init__(
        self,
        binder: Binder,
        stable: bool,
        resolve: Callable[[WeightHandle], torch.Tensor],
        policies: Sequence[Activations],
        offload: Offload | None,
    ) -> None:
        self._binder = binder
        self._stable = stable
        self._resolve = resolve
        self._policies = policies
        self._offload = offload
        self._around_forward = ExitStack()
        self._around_modules: list[ExitStack] = []
        self.stage = 0

    @property
    def _is_needed(self) -> bool:
        return torch.is_grad_enabled() and (not self._stable or self._offload is not None)

    def _hooks(self) -> AbstractContextManager[None]:
        return without_weights(self._binder.handle_of, self._resolve, self._move_out)

    def _move_out(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        if self._offload is None or self._policies[self.stage] is not Activations.OFFLOAD:
            return None
        return self._offload(tensor)

    def begin_forward(self) -> None:
        """Begin to replace the tensors that autograd saves, until `end_forward`."""
        if self._is_needed:
            self._around_forward.enter_context(self._hooks())

    def end_forward(self) -> None:
        """Undo `begin_forward`."""
        self._around_forward.close()

    def begin_module(self) -> None:
        """Replace saved tensors before the user's hooks, which may be set around this module, get them.

        In backward, where a checkpoint runs a module again, there may be no hooks at all.
        """
        around = ExitStack()
        # The hooks of an enclosing module do it already.
        if self._is_needed and not are_weights_kept_out():
            around.enter_context(self._hooks())
        self._around_modules.append(around)

    def end_module(self) -> None:
        """Undo `begin_module`, unless `reset` has done so."""
        if self._around_modules:
            self._around_modules.pop().close()

    def reset(self) -> None:
        """Undo all calls of `begin_module`, the innermost first, then `begin_forward`."""
        while self._around_modules:
            self._around_modules.pop().close()
        self._around_forward.close()

    def close(self) -> None:
        """Release the threads and memory of offloaded activations."""
        if self._offload is not None:
            self._offload.close()
