"""Hooks for the tensors that autograd saves: set around forwards, and inside the user's own such hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from headwater.plan.types import Plan
from headwater.stream.offload import Offload
from headwater.stream.saved_tensors import WeightHandle, are_weights_kept_out, without_weights

if TYPE_CHECKING:
    from headwater.stream.binding import Binder


class Packing:
    """Makes autograd save handles instead of weights, and offloads activations as the plan says.

    It is not needed if weights stay in the same memory and no activation is offloaded.

    Args:
        binder: finds the handle of a tensor that is a view of weights.
        resolve: returns the weight of a handle.
        plan: decides the policy for the activations of each stage, and tells which stages are divided.
        offload: offloads activations; `None` if the plan offloads none.
    """

    def __init__(
        self,
        binder: Binder,
        resolve: Callable[[WeightHandle], torch.Tensor],
        plan: Plan,
        offload: Offload | None,
    ) -> None:
        self._binder = binder
        self._resolve = resolve
        self._policies = plan.activations
        self._divided = frozenset(plan.trace.members)
        self._offload = offload
        self._around_modules: list[ExitStack] = []
        self._stage = 0  # whose forward runs; its policy decides what happens to an activation

    def _move_out(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        if self._offload is None or not self._policies[self._stage].is_offloaded:
            return None
        return self._offload(tensor)

    def begin_module(self, stages: Sequence[int]) -> None:
        """Begin to replace the tensors that autograd saves in a module with these stages, until `end_module`.

        Hooks that the user has set around the module get what is saved instead. So do those of a checkpoint
        that recomputes a divided block: if the checkpoint kept weights, all parts of the block would stay in
        slabs until the end of the block's backward.
        """
        if stages:
            self._stage = stages[-1]
        around = ExitStack()
        handle_of = self._binder.handle_of
        # The hooks of an enclosing module do it already.
        recomputed_whole = self._divided.isdisjoint(stages)
        if torch.is_grad_enabled() and not are_weights_kept_out(handle_of, checkpoints=recomputed_whole):
            around.enter_context(without_weights(handle_of, self._resolve, self._move_out))
        self._around_modules.append(around)

    def end_module(self) -> None:
        """Undo `begin_module`, unless `reset` has done so."""
        if self._around_modules:
            self._around_modules.pop().close()

    def reset(self) -> None:
        """Undo all calls of `begin_module`, the innermost first."""
        while self._around_modules:
            self._around_modules.pop().close()

    def close(self) -> None:
        """Release the threads and memory of offloaded activations."""
        if self._offload is not None:
            self._offload.close()
