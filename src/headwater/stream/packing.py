"""Saved-tensor hooks: they are set around the forwards of modules, inside the user's saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from headwater.plan.types import Activations, Plan
from headwater.stream.offload import Offload
from headwater.stream.saved_tensors import (
    HandleOf,
    ParameterHandle,
    Resolve,
    are_weights_kept_out,
    without_weights,
)
from headwater.stream.selective import Selection
from headwater.stream.transforms import in_derivative


class Packing:
    """Makes autograd save handles instead of weights, and treats activations as the plan says.

    Attributes:
        mark: an object that every tensor which autograd saves in the present forward keeps.

    Args:
        handle_of: returns the handle of a weight; `None` for other tensors.
        resolve: returns the weight of a handle.
        plan: has the activation policy of each stage, and the divided blocks.
        offload: offloads activations; `None` if the plan offloads none.
        in_checkpoints: replace weights also inside checkpoints that this project makes. Otherwise these save
            frozen parameters themselves; see [Note: parameters that autograd saves].
        selects: compute the values of cheap operators again in stages whose policy is `SELECTIVE`.
    """

    def __init__(
        self,
        handle_of: HandleOf,
        resolve: Resolve,
        plan: Plan,
        offload: Offload | None,
        *,
        in_checkpoints: bool = False,
        selects: bool = False,
    ) -> None:
        self.mark: object = None
        self._selection = Selection(handle_of, resolve) if selects else None
        self._handle_of = handle_of
        self._resolve = resolve
        self._policies = plan.activations
        self._divided = frozenset(plan.trace.members)
        self._in_checkpoints = in_checkpoints
        self._offload = offload
        self._around_modules: list[ExitStack] = []
        self._stage = 0  # the stage whose forward runs: its policy decides what happens to activations

    def _move_out(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        policy = self._policies[self._stage]
        if self._selection is not None and policy is Activations.SELECTIVE:
            return self._selection.function_for(tensor)
        return self._offload(tensor) if self._offload is not None and policy.is_offloaded else None

    def begin_module(self, stages: Sequence[int]) -> None:
        """Replace the tensors that autograd saves in a module with these stages, until `end_module`.

        Hooks that the user has set around the module get every tensor except weights. So do the hooks of a
        checkpoint that recomputes a divided block: if the checkpoint kept weights, all parts of the block
        would stay in slabs until the end of the block's backward.
        """
        with ExitStack() as around:
            if stages:
                around.callback(setattr, self, "_stage", self._stage)
                self._stage = stages[-1]
            # torch.func does not allow saved-tensor hooks. For moving weights see `refuse_moving_weights`.
            if torch.is_grad_enabled() and not in_derivative():
                if not self._is_done_around(stages):
                    hooks = without_weights(self._handle_of, self._resolve, self._move_out, self.mark)
                    around.enter_context(hooks)
                # A module without a stage is left out: recipes could need weights of several stages there.
                is_selective = self._policies[self._stage] is Activations.SELECTIVE
                if self._selection is not None and stages and is_selective:
                    around.enter_context(self._selection.watching())
            self._around_modules.append(around.pop_all())  # not reached if the user has disabled such hooks

    def _is_done_around(self, stages: Sequence[int]) -> bool:
        """True if the hooks of an enclosing module already replace what a module with these stages saves."""
        checkpoints = not self._in_checkpoints and self._divided.isdisjoint(stages)
        return are_weights_kept_out(self._handle_of, checkpoints=checkpoints)

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


def make_packing(
    plan: Plan,
    handle_of: HandleOf,
    resolve: Resolve,
    offload: Offload | None,
    *,
    stable: bool,
) -> Packing | None:
    """Return the object that replaces the tensors that autograd saves; `None` if it may save all of them.

    Args:
        plan: the plan.
        handle_of: returns the handle of a tensor that is a view of weights; `None` for other tensors.
        resolve: returns the weight of such a handle, and fetches its stage if necessary.
        offload: offloads activations; `None` if the plan offloads none.
        stable: true if weights stay in the same memory.
    """
    # Backwards of compiled blocks run in Python. In fp32 another backward in Python finds the same values in
    # the store, so more hooks would only cost time.
    in_python = plan.blocks.compiled or plan.precision.mixed
    # A compiled block decides itself what it saves, and its operators are not seen one by one.
    selects = Activations.SELECTIVE in plan.activations and not plan.blocks.compiled
    if not stable or offload is not None:
        return Packing(handle_of, resolve, plan, offload, in_checkpoints=in_python, selects=selects)
    if in_python or selects:
        own = ParameterHandle.of, ParameterHandle.resolve
        return Packing(*own, plan, None, in_checkpoints=True, selects=selects)
    return None
