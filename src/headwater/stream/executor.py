"""The executor of a model: it provides weights for forwards and backwards, and takes the gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.recorder import COMPUTE, RECORDER
from headwater.plan.types import Plan
from headwater.store.store import WeightStore
from headwater.stream.backward import BackwardWatch
from headwater.stream.binding import Binder
from headwater.stream.device import Device
from headwater.stream.forwards import Forwards
from headwater.stream.gradient_copies import GradientCopies
from headwater.stream.gradient_hooks import GradientHooks
from headwater.stream.host_arena import HostArena
from headwater.stream.node_attributes import ContextWeights
from headwater.stream.offload import make_offload
from headwater.stream.packing import make_packing
from headwater.stream.recompute import RecomputedForwards
from headwater.stream.saved_tensors import HandleAtRest, WeightHandle, keep_weights_out_of_node
from headwater.stream.sites import Sites, Stages
from headwater.stream.transforms import refuse_copies_of_saved_weights, refuse_moving_weights
from headwater.stream.weights import StreamStatistics, Weights


class Executor:
    """Runs one model as its plan says: hooks in the model bind weights and take gradients.

    In a forward of the model, or of a part of it, hooks fetch the weights, and autograd saves handles instead
    of weights. The executor notices a backward at the first use of a weight or a gradient in it. Autograd
    calls a function of the executor at the end of the backward.

    Args:
        model: the model; it gets hooks.
        plan: the plan.
        store: provides weights and receives gradients.
        binder: owns the model's parameters.
        weights: provides stages on the device.
        device: the device that computes.
        gradient_factor: every gradient is multiplied by this factor before it is added to the store.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        store: WeightStore,
        binder: Binder,
        weights: Weights,
        device: Device,
        gradient_factor: float = 1.0,
    ) -> None:
        self._plan, self._store = plan, store
        self._binder = binder
        self._weights = weights
        self._backward = BackwardWatch(self._end_backward)
        with ExitStack() as made:  # a part that cannot be made must not leave hooks, threads or files behind
            self._arena = HostArena(device.page_lock)
            made.callback(self._arena.close)
            offload = make_offload(plan, device, self._arena)
            if offload is not None:
                made.callback(offload.close)
            self._packing = make_packing(
                plan, binder.handle_of, self._resolve, offload, stable=weights.stable
            )
            self._forwards = Forwards(
                binder,
                self._require,
                self._packing,
                self._backward,
                self._open,
                self._unbind_all,
                [stage.name for stage in plan.trace.stages],
            )
            contexts = ContextWeights(weights.has_views, binder.handle_of, self._resolve)
            self._sites = Sites(
                model,
                {"": (), **plan.trace.sites},
                plan.trace.stages,
                self._forwards.enter,
                self._forwards.bind_early,
                self._forwards.leave,
                None if weights.stable else contexts.keep_out,
            )
            made.callback(self._sites.remove)
            copies = None if device.reads_host else GradientCopies(store, device, self._arena)
            if copies is not None:
                made.callback(copies.close)
            self._gradients = GradientHooks(binder, store, weights, self._backward, copies, gradient_factor)
            made.callback(self._gradients.remove)
            self._recomputed = RecomputedForwards(
                _recomputed_modules(model, plan),
                self._bound,
                lambda stages: self._current._versions(stages),
            )
            made.pop_all()
        # By stage, a number that is added to the store's version, so that versions continue to grow when this
        # executor replaces one with another store.
        self._earlier_versions = [0] * len(plan.trace.stages)
        self._forwards_expected = 0  # forwards that are left of the step that `begin` has announced
        self._successor: Executor | None = None
        self._is_outlived = False  # nothing can provide weights for graphs made here

    @property
    def is_idle(self) -> bool:
        """True if neither a forward nor a backward runs."""
        return not self._forwards.are_running and not self._backward.is_running

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enter a context in which calls of the model bind no weights."""
        self._forwards.are_followed = False
        self._recomputed.unhook()
        try:
            yield
        finally:
            self._forwards.are_followed = True
            self._recomputed.hook()

    # called by parts of the executor during a forward or backward

    @contextmanager
    def _bound(self, stages: Stages) -> Iterator[None]:
        """Enter a context in which the weights of a recomputed forward are bound."""
        # An optimizer may step in the forward, and this executor may get a successor there.
        forwards = self._current._forwards
        forwards.enter(stages)
        try:
            yield
        finally:
            forwards.leave(stages)

    def _open(self) -> None:
        """Prepare an outermost forward. Called when it begins."""
        self._backward.lane = RECORDER.lane()
        # Transforms of torch.func read weights later, so weights must stay in the same memory.
        if not self._weights.stable:
            refuse_moving_weights()
        refuse_copies_of_saved_weights()
        if self._packing is not None:
            self._packing.mark = None  # drops the mark of the previous forward
        if torch.is_grad_enabled() and not self._forwards_expected:  # steps of the engine discard gradients
            self._gradients.collect_left()
        if self._gradients.casts and torch.is_grad_enabled():
            mark = self._gradients.begin_forward(self._versions(tuple(range(len(self._plan.trace.stages)))))
            assert self._packing is not None, "weights that autocast casts are streamed in 16 bits"
            self._packing.mark = mark
        if self._forwards_expected:
            self._forwards_expected -= 1
        else:  # `begin` has not announced it: the user's loop calls the model
            # Without gradients no backward follows, so the schedule consists of forward uses alone.
            self.begin(1 if torch.is_grad_enabled() else 0)
            self._forwards_expected = 0

    def _require(self, stage: int) -> torch.Tensor:
        """Fetch a stage for a forward or a backward, and return its wire image on the device."""
        # If this fetch is the first in a backward, the end of that backward must unbind the weights.
        self._backward.notice()
        if self._store.in_backward is not None and self._backward.is_running:
            self._store.in_backward.note_use(stage)
        start = time.perf_counter()
        image = self._weights.require(stage)
        self._weights.statistics.wait_s += time.perf_counter() - start
        return image

    def _resolve(self, handle: WeightHandle | HandleAtRest) -> torch.Tensor:
        """Fetch the stage of a weight that autograd has saved as a handle, and return the weight."""
        if isinstance(handle, HandleAtRest):
            return handle.resolve()
        current = self._current
        # The check is first: if the stage was updated, the slab would hold the weights of another step.
        current._binder.stages[handle.stage].check_unchanged(handle)
        image = current._require(handle.stage)
        current._binder.note_place(handle.stage, image)
        if current._backward.is_running:  # from here on the backward computes gradients of this stage
            RECORDER.lane().switch((COMPUTE, current._plan.trace.stages[handle.stage].name))
            if torch.is_grad_enabled():  # `create_graph=True`
                keep_weights_out_of_node(current._binder.handle_of, current._resolve)
        return handle.resolve(image)

    def _versions(self, stages: Stages) -> list[int]:
        """Return the present versions of stages' weights. They grow on if a successor has another store."""
        if self._store.in_backward is not None:  # `note_use` checks each use
            return []
        return [self._earlier_versions[stage] + self._store.version(stage) for stage in stages]

    def _end_backward(self) -> None:
        """Called at the end of each backward, also of one that a forward or another backward runs."""
        self._unbind_all()
        if self._plan.user_loop:
            self._gradients.end_micro_batch()

    def _unbind_all(self) -> None:
        """Unbind all weights until another forward or backward begins."""
        self._binder.unbind_all()
        self._weights.allow_eviction()

    # one step

    def begin(self, num_micro_batches: int = 0) -> StreamStatistics:
        """Prepare one training step, or inference.

        Args:
            num_micro_batches: the micro-batches of the step; 0 for inference.

        Returns:
            The statistics, which are updated during the step.
        """
        self.reset()
        # Forwards from now on use the weights of these commits, so the commits must not be rolled back.
        self._store.ledger.note_all_used()
        self._forwards_expected = num_micro_batches
        if self._binder.unseen is not None:
            self._binder.unseen.next_step(trains=num_micro_batches > 0)
        # Statistics are new before `Weights.begin`, which counts the bytes that it fetches ahead.
        self._weights.statistics = StreamStatistics()
        if num_micro_batches:
            self._weights.begin(self._plan.schedule * num_micro_batches)
        else:
            self._weights.begin(self._plan.trace.uses, repeats=True)
        return self._weights.statistics

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Enter a context that counts as one forward, whose schedule repeats. Gradients must be disabled.

        Without this context, a method of the model that calls several modules counts as several forwards.
        Each of them would restart the schedule, and prefetch its first stages instead of the next ones.
        """
        # An earlier context that an error has ended may have left weights bound.
        self.reset()
        self._forwards.enter(())
        try:
            yield
        finally:
            self._forwards.leave(())

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run the backward of one micro-batch; gradients go to the store.

        Args:
            loss: scalar, already scaled.
            last: true for the last micro-batch of the step.
        """
        try:
            with self._gradients.micro_batch(last=last):
                loss.backward()
            # Not at the end of each backward: ranks may differ in the backwards that run inside this one.
            self._gradients.end_micro_batch()
        finally:
            # Unbound weights free their slabs, also after an error.
            self._unbind_all()

    def reset(self) -> None:
        """Forget a forward or backward that an error has ended, and unbind all weights."""
        self._unbind_all()
        self._forwards.reset()
        self._backward.forget()
        self._forwards_expected = 0

    # removal from the model, and graphs that are used after it

    def leave(self) -> None:
        """Remove all hooks from the model. Offloaded activations can still be restored."""
        self.reset()
        # The user may call the model between two of these removals.
        self._forwards.are_followed = False
        self._sites.remove()
        self._recomputed.unhook()
        self._gradients.remove()
        try:
            self._gradients.close()
        finally:
            # The weights are closed last, when no hook requests them any more.
            self._weights.close()

    @property
    def _current(self) -> Executor:
        """The executor that provides weights now for graphs that were made here.

        Raises:
            StreamError: if no executor can, because the engine was closed, or because the model was planned
                again with another structure or precision, or has no plan.
        """
        current = self
        while current._successor is not None:
            current = current._successor
        if not current._binder.stages:  # after `close`
            raise StreamError(
                "the engine was closed between this forward and its backward, which needs the weights",
                remedy="run this backward before the engine is closed; in your own loop, before "
                "headwater.release(model)",
            )
        if current._is_outlived:
            raise StreamError(
                "the model was planned again between this forward and its backward, which needs the weights "
                "of the earlier plan. Reasons for a new plan: the model's structure was changed, its first "
                "forward outside of autocast ran, a block was divided for a larger call, or the new plan "
                "failed",
                remedy="run this backward before the forward that needs a new plan, or run the model's first "
                "forward without autocast",
            )
        return current

    def refuse_backwards(self) -> None:
        """Make backwards through graphs that were made here raise an error: no executor has the model now."""
        self._is_outlived = True
        # Their gradients would not reach the store.
        self._binder.forget_saved()

    def hand_over(self, successor: Executor, *, unchanged: bool) -> None:
        """Make `successor` provide the weights for backwards through graphs that were made here.

        Args:
            successor: the executor that has the model now.
            unchanged: true if the model has the same stages and modules there.
        """
        if unchanged:
            self._successor = successor
            successor._gradients.blocks = self._gradients.blocks
            # The successor may have another store, whose versions began with another number.
            before, after = self._store, successor._store
            successor._earlier_versions = [
                earlier + before.version(stage) - after.version(stage)
                for stage, earlier in enumerate(self._earlier_versions)
            ]
        else:
            self._is_outlived = True
        # Graphs made here have saved the parameters themselves, which point to placeholders now.
        if self._weights.stable and successor._weights.stable:
            successor._binder.point_saved(successor._weights.require)
        elif self._weights.stable:  # their memory will hold other stages
            self._binder.forget_saved()
        # Memory that the arena has lent is unlocked when these graphs and the store drop it.
        self._arena.close()

    def close(self) -> None:
        """Remove all hooks, and release memory and threads, even if adding a gradient raises an error."""
        with ExitStack() as closed:
            # This object and its parts are a reference cycle, which must not keep the model's memory.
            closed.callback(self._binder.forget)
            closed.callback(self._recomputed.forget)
            # This callback runs last, after offloaded activations are closed, which are in the arena.
            closed.callback(self._arena.close)
            if self._packing is not None:
                closed.callback(self._packing.close)
            self.leave()


def _recomputed_modules(model: nn.Module, plan: Plan) -> list[tuple[nn.Module, Stages]]:
    """Return the modules whose forwards run again in backward, each with the stages to bind meanwhile.

    The parts of a divided block are recomputed with the whole block. A forward may also read weights of other
    stages directly: a head whose weight is that of the embedding.
    """
    return [
        (
            model.get_submodule(stage.name),
            tuple(sorted({stage.index, *plan.trace.sites.get(stage.name, ())})),
        )
        for stage, policy in zip(plan.trace.stages, plan.activations, strict=True)
        if policy.is_recomputed and not plan.is_recomputed_inside(stage.index)
    ]
