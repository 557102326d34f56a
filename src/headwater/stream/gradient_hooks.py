"""Hooks that move gradients from autograd to the store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headwater.core.interrupts import uninterrupted
from headwater.core.recorder import COMPUTE, GRADIENT, RECORDER, Work
from headwater.core.stage import ParamKey, ParamSpec
from headwater.stream.autocast_blocks import AutocastBlocks, ForwardMark, add_gradients_in
from headwater.stream.backward import BackwardWatch
from headwater.stream.left_gradients import collect_left, take_accumulated
from headwater.stream.weights import Weights

if TYPE_CHECKING:
    from headwater.store.store import WeightStore
    from headwater.stream.binding import Binder
    from headwater.stream.gradient_copies import GradientCopies
    from headwater.stream.home import Home


class GradientHooks:
    """Moves each gradient to the store as soon as autograd has accumulated it.

    Attributes:
        blocks: the autocast blocks of the forwards.
        casts: the trained weights that plain PyTorch would cast once in a forward.
        last_micro_batch: true if no further micro-batch of the step is expected. In a user's loop it is
            always true. With updates in backward it is true only inside `micro_batch`, because a forward may
            itself call `backward`.

    Args:
        binder: owns the parameters.
        store: receives the gradients.
        weights: has the statistics, which count the bytes of gradients.
        copies: brings gradients to the place of their sums; `None` if they are computed there.
        backward: is notified that a backward runs.
        factor: every gradient is multiplied by it; 1 / ranks makes the sum over ranks a mean.
    """

    def __init__(
        self,
        binder: Binder,
        store: WeightStore,
        weights: Weights,
        backward: BackwardWatch,
        copies: GradientCopies | None,
        factor: float,
    ) -> None:
        self._store = store
        self._copies = copies
        self._weights = weights
        self._backward = backward
        self._factor = factor
        self.last_micro_batch = store.in_backward is None
        trained = [(param, key) for key, param in binder.parameters() if param.requires_grad]
        self._trained = [param for param, _ in trained]
        self.casts = [(param, store.spec(key)) for param, key in trained if store.spec(key).one_cast]
        self.blocks = AutocastBlocks()
        with ExitStack() as hooks:  # a hook that cannot be registered must not leave the others behind
            for param, key in trained:
                if add_gradients_in(store.spec(key).gradient_dtype, param):
                    # `None` allows any dtype: torch has no way back to the parameter's dtype.
                    hooks.callback(add_gradients_in, None, param)
                hooks.callback(_register_first(param, self._hook(key, store.spec(key))).remove)
            self._registered = hooks.pop_all()

    def _hook(self, key: ParamKey, spec: ParamSpec) -> Callable[[torch.Tensor], None]:
        # The reference is weak, because Python's garbage collector does not see those of a tensor's hook.
        reference = weakref.ref(self)
        name = self._store.stages[key[0]].name
        giving: Work = (GRADIENT, name)
        computing: Work = (COMPUTE, name)

        @uninterrupted
        def hook(param: torch.Tensor) -> None:
            if not hasattr(param, "home"):
                return  # the parameter is a plain one now
            hooks = reference()
            assert hooks is not None, "a parameter at rest has an engine"
            # With weights that stay in memory, no fetch notices the backward.
            hooks._backward.notice()
            gradient = take_accumulated(param)
            if gradient is None:
                return
            if spec.one_cast:  # see `begin_forward`
                vars(param).pop("is_master_read", None)
                gradient = gradient.to(spec.gradient_dtype)
            lane, num_bytes = RECORDER.lane(), gradient.numel() * gradient.element_size()
            lane.switch(giving)
            hooks._weights.statistics.bytes_out += num_bytes
            try:
                hooks._add_to_store(key, spec, gradient)
                # The update frees the gradient's memory only if there is no other reference.
                del gradient
                if hooks._store.in_backward is not None:
                    hooks._store.in_backward.advance(key[0], last=hooks.last_micro_batch)
            finally:
                lane.switch(computing, num_bytes)

        return hook

    def _add_to_store(self, key: ParamKey, spec: ParamSpec, gradient: torch.Tensor) -> None:
        if spec.strides is not None and not gradient.is_sparse:
            # autograd gave the gradient the strides of the placeholder. A norm adds in the order of memory,
            # so other strides would change its last bits.
            gradient = spec.like_the_parameter(gradient)
        if self._factor != 1.0:
            gradient *= self._factor
        if self._copies is not None and not gradient.is_sparse:
            self._copies.send(key, gradient, last=self.last_micro_batch)
            return
        if self._copies is not None:
            self._copies.finish()  # gradients are added in the order of autograd
        there = gradient.to(self._store.gradient_device(key[0]))
        self._store.add_gradient(key, there, last=self.last_micro_batch)

    def begin_forward(self, versions: list[int]) -> ForwardMark | None:
        """Choose the dtype in which autograd will add the gradients of weights that autocast casts.

        Call it at the beginning of a forward with gradients. See [Note: one cast in an autocast block].

        Args:
            versions: the present version of each stage.

        Returns:
            The mark of the forward, which every tensor that autograd saves in it must keep; `None` if there
            is no such weight.
        """
        casts = [(param, spec) for param, spec in self.casts if hasattr(param, "home")]
        if not casts:
            return None
        home: Home = casts[0][0].home
        are_narrow, mark = self.blocks.begin_forward(home.device.type, versions)
        for param, spec in casts:
            # The user's hooks must see gradients in the dtype of the parameter.
            is_narrow = are_narrow and not (param._backward_hooks or hasattr(param, "is_master_read"))
            add_gradients_in(spec.wire_dtype if is_narrow else spec.gradient_dtype, param)
        return mark

    def collect_left(self) -> None:
        """Move gradients that Ctrl-C has left in parameters to the store."""
        for param in self._trained:
            if hasattr(param, "home"):
                collect_left(param)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Enter a context for the backward of a micro-batch. `last`: it is the step's last micro-batch."""
        before, self.last_micro_batch = self.last_micro_batch, last
        try:
            yield
        finally:
            self.last_micro_batch = before

    def end_micro_batch(self) -> None:
        """Tell the store that this micro-batch has no more gradients, after the last one was added."""
        if self._copies is None:
            self._store.end_micro_batch()
        else:
            self._copies.end_micro_batch()

    def remove(self) -> None:
        """Remove the hooks from the parameters, and forget the parameters."""
        self.collect_left()
        self._registered.close()
        self._trained.clear()
        self.casts.clear()

    def close(self) -> None:
        """End the thread that adds gradients."""
        if self._copies is not None:
            self._copies.close()


def _register_first(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook that runs before the user's hooks, so that these see the sum in the store."""
    earlier = dict(param._post_accumulate_grad_hooks or {})
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
    hooks = param._post_accumulate_grad_hooks
    for key, others in earlier.items():
        del hooks[key]
        hooks[key] = others
    return handle
