"""Costs of the stages in a dry run, added up operator by operator."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from headwater.core.buffers import LARGE_BLOCK_BYTES
from headwater.core.trees import operands
from headwater.plan.alive import AliveTensors, memory_key, num_bytes, storage_bytes
from headwater.plan.operator_flops import operator_flops, temporary_bytes
from headwater.plan.recipes import Recipes
from headwater.plan.step_trace import StageCost


@final
class StageCosts:
    """The costs of every stage. The cost of an operator is added to the current stage.

    Attributes:
        current: index of the current stage.
        in_backward: True if backward runs.

    Args:
        num_stages: number of stages.
        inference: True if the step is a forward alone.
    """

    def __init__(self, num_stages: int, *, inference: bool) -> None:
        self.current = 0
        self.in_backward = False
        self._inference = inference
        self._costs = [StageCost() for _ in range(num_stages)]
        self._alive = AliveTensors()
        self._not_saved: set[int] = set()
        self._state: set[int] = set()
        self._saved: dict[int, torch.Tensor] = {}
        self._recipes = Recipes(self._weight, lambda weight: weight)
        self._depth = 0  # forwards of stages that run now, one inside the other

    def _weight(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor if memory_key(tensor) in self._not_saved else None

    def leave_out(self, params: Iterable[torch.Tensor], state: Iterable[torch.Tensor]) -> None:
        """Exclude the tensors of the model itself, so that their memory is not counted as a cost.

        Args:
            params: parameters, which are not counted if autograd saves them.
            state: parameters and buffers. Neither their memory nor that of their views is counted.
        """
        self._not_saved = {memory_key(param) for param in params}
        everything = list(state)
        self._state = {memory_key(tensor) for tensor in everything}
        self._alive = AliveTensors(ignored=everything)

    def enter(self, stage: int, inputs: Iterable[torch.Tensor]) -> None:
        """Begin the forward of a stage with these inputs."""
        self._costs[stage].input_bytes += sum(num_bytes(t) for t in inputs if t.requires_grad)
        self.current = stage
        self._depth += 1

    def leave(self, stage: int, outputs: Sequence[torch.Tensor]) -> None:
        """End the forward of a stage with these outputs. The stage stays current until another one begins."""
        self._costs[stage].output_bytes += sum(map(num_bytes, outputs))
        self.when_backward_reaches(outputs, stage)
        self._depth -= 1
        if not self._depth:
            self._recipes.clear()

    def when_backward_reaches(self, tensors: Iterable[torch.Tensor], stage: int) -> None:
        """Make `stage` current when backward reaches one of these tensors."""
        for tensor in tensors:
            if tensor.requires_grad:
                # The hook has a weak reference: the garbage collector cannot free a cycle through a hook.
                tensor.register_hook(functools.partial(_set_current, weakref.ref(self), stage))

    def save(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        """Count the bytes of a tensor that autograd saves: those of its storage, and of each storage once.

        Args:
            tensor: the tensor.
            inputs: keys of the storages of the stage's inputs, which are counted already.
        """
        key = memory_key(tensor)
        if key in self._not_saved:
            return
        before, is_cheap = self._recipes.num_bytes, False
        if self._depth:  # the engine watches operators only inside the forward of a stage
            is_cheap = self._recipes.function_for(tensor) is not None
            if not is_cheap:
                self._recipes.keep(tensor)
        if key not in self._saved and key not in inputs and key not in self._state:
            self._saved[key] = tensor  # kept: new memory could get the address of freed memory
            cost = self._costs[self.current]
            cost.saved_bytes += storage_bytes(tensor)
            if is_cheap:
                cost.cheap_bytes += storage_bytes(tensor)
                cost.again_bytes += self._recipes.num_bytes - before

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Count an operator; return its floating-point operations."""
        cost = self._costs[self.current]
        made = operands((out,))
        cost.transient_bytes = max(cost.transient_bytes, self._bytes_beside(func, args, made))
        flops = operator_flops(func, args, kwargs, out)
        if self._depth and not self.in_backward:
            self._recipes.note(func, args, kwargs, out)
        phase = cost.backward if self.in_backward else cost.forward
        phase.flops += flops.whole
        phase.attention_flops += flops.attention
        phase.kernel_attention_flops += flops.kernel_attention
        phase.new_bytes += _new_bytes(func, args, kwargs, made)
        phase.operators += 1
        return flops.whole

    def take_over(self, stage: int, original: int) -> None:
        """Record for `stage`, which did not run, the costs of the equal stage `original`."""
        self._costs[stage] = self._costs[original]

    def of(self, stage: int, *, recomputable: bool) -> StageCost:
        """Return the costs of a stage.

        Args:
            stage: its index.
            recomputable: True if its forward can run again.
        """
        return dataclasses.replace(self._costs[stage], recomputable=recomputable)

    def _bytes_beside(self, func: Any, args: tuple[Any, ...], made: Sequence[torch.Tensor]) -> int:
        """Return the bytes of temporary tensors while this operator runs.

        In inference these are the bytes of all living tensors. In training they are the bytes of the
        operator's results and temporary tensors only, because most living tensors are saved by autograd and
        counted in `save`.
        """
        if not self._inference:
            return 0 if func.is_view else sum(map(num_bytes, made)) + temporary_bytes(func, args)
        for tensor in made:
            self._alive.add(tensor)
        return self._alive.num_bytes


def _new_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages that an operator allocates for its results, small ones not counted."""
    if func.is_view:
        return 0
    large = {
        memory_key(tensor): size for tensor in made if (size := storage_bytes(tensor)) >= LARGE_BLOCK_BYTES
    }
    # Only large results are examined, because a dry run has many operators.
    for tensor in operands((*args, *kwargs.values())) if large else ():
        large.pop(memory_key(tensor), None)  # the operator has written to one of its arguments
    return sum(large.values())


def _set_current(reference: weakref.ref[StageCosts], stage: int, gradient: torch.Tensor) -> None:
    """Make `stage` current. Autograd calls this hook when backward reaches a tensor."""
    costs = reference()
    if costs is not None:
        costs.current = stage
