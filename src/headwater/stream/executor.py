"""Runs a model whose weights come and go: binds each stage where it is read, hands its gradients out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwater.core.errors import StreamError
from headwater.plan.types import Activations, Plan
from headwater.store.store import WeightStore
from headwater.stream.activations import (
    WeightHandle,
    are_weights_kept_out,
    own_checkpoints,
    recompute_forward,
    without_weights,
)
from headwater.stream.binding import Binder
from headwater.stream.offload import DiskOffload, HostOffload, Offload
from headwater.stream.sites import Sites
from headwater.stream.transforms import refuse_moving_weights
from headwater.stream.weights import StreamStatistics, Weights

_NO_TASK = -1
_GRAD: Any = torch.Tensor.grad


class Executor:
    """One model, one store, one plan. It follows what the model does, whoever calls it.

    A forward of the model, or of a part of it, brings its weights by hooks; what autograd saves then holds no
    weights; a backward is noticed by the first thing in it that concerns us, and tidied up by a callback.

    Args:
        model: the model; its calls are surrounded.
        plan: what to do.
        store: where weights come from and gradients go.
        binder: owns the model's parameters.
        weights: brings stages to the device.
        share: of gradients here in those of the store.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        store: WeightStore,
        binder: Binder,
        weights: Weights,
        share: float = 1.0,
    ) -> None:
        self._share = share
        self._plan = plan
        self._store = store
        self._binder = binder
        self._weights = weights
        self._depth: Counter[int] = Counter()
        self._active = True
        self._nesting = 0  # modules with a site whose forward runs
        self._packing = ExitStack()
        self._inner_packing: list[ExitStack] = []  # of each of these modules: see `_pack_inside_hooks`
        self._forwards_expected = 0
        self._last_micro_batch = True
        self._backward_task = _NO_TASK
        self._forward_stage = 0
        self._offload = _make_offload(plan)
        sites = {"": (), **plan.trace.sites}
        self._sites = Sites(
            model, sites, plan.trace.stages, self.enter_module, self._look_ahead, self._leave_module
        )
        self._gradient_hooks = list(self._hook_gradients())
        self._recomputed = [
            (model.get_submodule(stage.name), stage.index)
            for stage, policy in zip(plan.trace.stages, plan.activations, strict=True)
            if policy is Activations.RECOMPUTE
        ]
        self._wrapped = self._hook_recompute()
        self._successor: Executor | None = None
        self._is_outlived = False  # by a model of another structure

    @property
    def is_idle(self) -> bool:
        """True if neither a forward nor a backward runs."""
        return not self._nesting and not self._in_backward

    # weights in

    def enter_module(self, stages: Sequence[int]) -> None:
        """A module's forward begins; the outermost one opens a forward."""
        if not self._active:
            return
        if not self._nesting:
            if self._in_backward:  # backward is through with what ran again before
                self._notice_backward()
                self._binder.unbind_all()
            else:
                self._open()
        self._nesting += 1
        self._inner_packing.append(self._pack_inside_hooks())
        for stage in stages:
            self._enter(stage)

    def _pack_inside_hooks(self) -> ExitStack:
        """Keep weights out of what autograd saves where the user has put hooks around a module.

        A checkpoint that runs a module again in backward may also have no hooks there. Closing the returned
        stack ends that.
        """
        packing = ExitStack()
        if self._packs and not are_weights_kept_out():
            packing.enter_context(self._without_weights())
        return packing

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it calls of the model are none of our business."""
        self._active = False
        self._wrapped.close()
        try:
            yield
        finally:
            self._active = True
            self._wrapped = self._hook_recompute()

    def _leave_module(self, stages: Sequence[int]) -> None:
        if not self._active:
            return
        try:
            for stage in stages:
                self._leave(stage)
        finally:
            self._nesting -= 1
            if self._inner_packing:  # a reset may have closed it
                self._inner_packing.pop().close()
            if not self._nesting and not self._in_backward:
                self._close()

    def _open(self) -> None:
        """A forward begins that is not part of another."""
        if not self._weights.stable:
            refuse_moving_weights()
        if self._forwards_expected:
            self._forwards_expected -= 1
        else:
            self.begin(1 if torch.is_grad_enabled() else 0)
            self._forwards_expected = 0
        if self._packs:
            self._packing.enter_context(self._without_weights())

    @property
    def _packs(self) -> bool:
        """True if what autograd saves now must hold no weights, or moves out."""
        return torch.is_grad_enabled() and (not self._weights.stable or self._offload is not None)

    def _without_weights(self) -> AbstractContextManager[None]:
        return without_weights(self._binder.handle_of, self._resolve, self._move_out)

    def _close(self) -> None:
        """The forward ends."""
        self._packing.close()
        self._let_go()

    def _enter(self, stage: int) -> None:
        self._depth[stage] += 1
        self._forward_stage = stage
        if self._depth[stage] == 1 and not self._binder.is_bound(stage):
            self._binder.bind(stage, self._require(stage))

    def _look_ahead(self, stages: Sequence[int]) -> None:
        """Bind stages whose modules will be called next; leaving these modules unbinds them."""
        if self._active:
            for stage in stages:
                if not self._binder.is_bound(stage):
                    self._binder.bind(stage, self._require(stage))

    def _leave(self, stage: int) -> None:
        self._depth[stage] -= 1
        if self._depth[stage] > 0:
            return
        if self._in_backward and own_checkpoints.are_innermost():
            self._binder.rest(stage)  # what runs again here saves a frozen parameter as itself
        else:
            self._binder.unbind(stage)

    def _resolve(self, handle: WeightHandle) -> torch.Tensor:
        """A weight that autograd has saved."""
        heir = self._heir
        heir._binder.check_unchanged(handle)
        return handle.resolve(heir._require(handle.stage))

    def _require(self, stage: int) -> torch.Tensor:
        self._notice_backward()
        start = time.perf_counter()
        image = self._weights.require(stage)
        self._weights.statistics.wait_s += time.perf_counter() - start
        return image

    def _hook_recompute(self) -> ExitStack:
        """Let the forwards that are to run again in backward do so; closing it takes that back."""

        def hook(module: nn.Module, stages: Sequence[int]) -> Callable[[], None]:
            return recompute_forward(
                module,
                lambda: self._heir.enter_module(stages),
                lambda: self._heir._leave_module(stages),
            )

        hooked = ExitStack()
        for module, stage in self._recomputed:
            hooked.callback(hook(module, (stage,)))
        return hooked

    def _move_out(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Move an activation out if the stage that runs says so."""
        if self._offload is None or self._plan.activations[self._forward_stage] is not Activations.OFFLOAD:
            return None
        return self._offload(tensor)

    # gradients out

    def _hook_gradients(self) -> Iterator[RemovableHandle]:
        for stage, index, param in self._binder.parameters():
            if param.requires_grad:
                before = dict(param._post_accumulate_grad_hooks or {})
                handle = param.register_post_accumulate_grad_hook(self._give_gradient(stage, index))
                hooks = param._post_accumulate_grad_hooks
                for key, hook in before.items():  # the user's come after ours: they see the sum
                    del hooks[key]
                    hooks[key] = hook
                yield handle

    def _give_gradient(self, stage: int, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            if not hasattr(param, "home"):
                return  # it has become a plain parameter
            self._notice_backward()
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # torch's own field, not that of a parameter at rest
                gradient = _GRAD.__get__(param)
                _GRAD.__set__(param, None)
            assert gradient is not None, "the hook runs when a gradient is there"
            self._weights.statistics.bytes_out += gradient.numel() * gradient.element_size()
            if self._share != 1.0:
                gradient *= self._share
            self._store.add_gradient(stage, index, gradient.to("cpu"), last=self._last_micro_batch)

        return hook

    # backward

    @property
    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != _NO_TASK

    def _notice_backward(self) -> None:
        """Let autograd call us when the backward ends in which we are, if we are in one."""
        task = torch._C._current_graph_task_id()
        if task not in (_NO_TASK, self._backward_task):
            self._backward_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_task = _NO_TASK
        self._let_go()
        self._store.end_micro_batch()

    def _let_go(self) -> None:
        """No weights are used until another forward or backward begins."""
        self._binder.unbind_all()
        self._weights.rest()

    # one step

    def begin(self, num_micro_batches: int = 0) -> StreamStatistics:
        """Get ready for one training step of so many micro-batches, or for inference if there are none.

        Returns:
            Statistics that fill as it goes on.
        """
        trace = self._plan.trace
        self.reset()
        self._store.use()
        self._forwards_expected = num_micro_batches
        self._weights.statistics = StreamStatistics()
        if num_micro_batches:
            self._weights.begin(trace.schedule * num_micro_batches)
        else:
            self._weights.begin(trace.uses, repeats=True)
        return self._weights.statistics

    def reset(self) -> None:
        """Forget a forward or backward that was broken off."""
        self._let_go()
        self._depth.clear()
        self._nesting = 0
        while self._inner_packing:
            self._inner_packing.pop().close()
        self._packing.close()
        self._backward_task = _NO_TASK
        self._forwards_expected = 0

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run the backward of one micro-batch; gradients go to the store.

        Args:
            loss: scalar, already scaled.
            last: whether it is the step's last micro-batch.
        """
        self._last_micro_batch = last
        try:
            loss.backward()
        finally:
            self._last_micro_batch = True
            self._let_go()

    def leave(self) -> None:
        """Take the layers off; activations that have moved out can still come back."""
        self.reset()
        self._active = False
        self._sites.remove()
        self._wrapped.close()
        for handle in self._gradient_hooks:
            handle.remove()
        self._weights.close()

    @property
    def _heir(self) -> Executor:
        """The executor that has the model now.

        Raises:
            StreamError: if the model has another structure there.
        """
        heir = self
        while heir._successor is not None:
            heir = heir._successor
        if heir._is_outlived:
            raise StreamError(
                "the structure of the model was changed, and a forward has run, between this forward and its "
                "backward",
                remedy="run the backward before the next forward of the changed model",
            )
        return heir

    def hand_over(self, successor: Executor, *, unchanged: bool) -> None:
        """Make `successor` provide the weights for backward graphs of forwards that ran here.

        Args:
            successor: the executor that has the model now.
            unchanged: whether stages and modules are the same there.
        """
        if unchanged:
            self._successor = successor
        else:
            self._is_outlived = True
        if self._weights.stable and not successor._weights.stable:
            self._binder.forget_saved()

    def close(self) -> None:
        """Remove all hooks, and release memory and threads."""
        self.leave()
        if self._offload is not None:
            self._offload.close()


def _make_offload(plan: Plan) -> Offload | None:
    if Activations.OFFLOAD not in plan.activations:
        return None
    if plan.device != "cpu":
        return HostOffload()
    assert plan.disk is not None, "on CPU activations are offloaded to disk, and the plan names the folder"
    return DiskOffload(plan.disk)
