"""Runs a model whose weights come and go: binds each stage where it is read, hands its gradients out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwater.plan.types import Activations, Plan
from headwater.store.store import WeightStore
from headwater.stream.activations import recompute_forward, without_weights
from headwater.stream.binding import Binder
from headwater.stream.offload import DiskOffload, HostOffload, Offload
from headwater.stream.sites import SiteHooks
from headwater.stream.weights import StreamStatistics, Weights


class Executor:
    """One model, one store, one plan.

    Args:
        model: the model; hooks are put on it.
        plan: what to do.
        store: where weights come from and gradients go.
        binder: owns the model's parameters.
        weights: brings stages to the device.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, store: WeightStore, binder: Binder, weights: Weights
    ) -> None:
        self._plan = plan
        self._store = store
        self._binder = binder
        self._weights = weights
        self._depth: Counter[int] = Counter()
        self._last_micro_batch = True
        self._in_backward = False
        self._forward_stage = 0
        self._offload = _make_offload(plan)
        self._hooks = SiteHooks(model, plan.trace.sites, self._enter, self._leave)
        self._gradient_hooks = list(self._hook_gradients())
        self._give_forwards_back = [
            self._hook_recompute(model.get_submodule(stage.name), stage.index)
            for stage, policy in zip(plan.trace.stages, plan.activations, strict=True)
            if policy is Activations.RECOMPUTE
        ]

    # weights in

    def _enter(self, stage: int) -> None:
        if self._in_backward and not self._depth.total():  # backward is through with what ran again before
            self._release()
        self._depth[stage] += 1
        self._forward_stage = stage
        if self._depth[stage] == 1:
            self._binder.bind(stage, self._require(stage))

    def _leave(self, stage: int) -> None:
        self._depth[stage] -= 1
        if self._depth[stage] == 0 and not self._in_backward and not self._weights.stable:
            self._binder.unbind(stage)

    def _release(self) -> None:
        """Unbind what a second forward has left bound: a frozen parameter is saved there as itself."""
        if not self._weights.stable:
            self._binder.unbind_all()

    def _require(self, stage: int) -> torch.Tensor:
        start = time.perf_counter()
        image = self._weights.require(stage)
        self._weights.statistics.wait_s += time.perf_counter() - start
        return image

    def _hook_recompute(self, module: nn.Module, stage: int) -> Callable[[], None]:
        return recompute_forward(module, lambda: self._enter(stage), lambda: self._leave(stage))

    def _move_out(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Move an activation out if the stage that runs says so."""
        if self._offload is None or self._plan.activations[self._forward_stage] is not Activations.OFFLOAD:
            return None
        return self._offload(tensor)

    # gradients out

    def _hook_gradients(self) -> Iterator[RemovableHandle]:
        for stage, index, param in self._binder.parameters():
            if param.requires_grad:
                yield param.register_post_accumulate_grad_hook(self._give_gradient(stage, index))

    def _give_gradient(self, stage: int, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            gradient, param.grad = param.grad, None
            assert gradient is not None, "the hook runs when a gradient is there"
            self._weights.statistics.bytes_out += gradient.numel() * gradient.element_size()
            self._store.add_gradient(stage, index, gradient.to("cpu"), last=self._last_micro_batch)

        return hook

    # one step

    def begin(self, num_micro_batches: int = 0) -> StreamStatistics:
        """Get ready for one training step of so many micro-batches, or for inference if there are none.

        Returns:
            Statistics that fill as it goes on.
        """
        trace = self._plan.trace
        self._binder.unbind_all()
        self._depth.clear()
        self._weights.statistics = StreamStatistics()
        if num_micro_batches:
            self._weights.begin(trace.schedule * num_micro_batches)
        else:
            self._weights.begin(trace.uses, repeats=True)
        return self._weights.statistics

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds the forward of a micro-batch whose backward will follow."""
        with ExitStack() as stack:
            if not self._weights.stable or self._offload is not None:
                stack.enter_context(without_weights(self._binder.stage_of, self._require, self._move_out))
            yield

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run the backward of one micro-batch; gradients go to the store.

        Args:
            loss: scalar, already scaled.
            last: whether it is the step's last micro-batch.
        """
        self._last_micro_batch = last
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
            self._release()
        self._store.end_micro_batch()

    def bind_all(self, stages: Sequence[int]) -> None:
        """Bind stages outside any forward, while there are slabs for all of them."""
        for stage in stages:
            self._binder.bind(stage, self._require(stage))

    def close(self) -> None:
        """Take the hooks off and give back memory and threads."""
        self._hooks.remove()
        for give_back in self._give_forwards_back:
            give_back()
        for handle in self._gradient_hooks:
            handle.remove()
        self._weights.close()
        if self._offload is not None:
            self._offload.close()


def _make_offload(plan: Plan) -> Offload | None:
    if Activations.OFFLOAD not in plan.activations:
        return None
    if plan.device != "cpu":
        return HostOffload()
    assert plan.disk is not None, "on CPU activations are offloaded to disk, and the plan names the folder"
    return DiskOffload(plan.disk)
