"""Weights that custom `autograd.Function`s keep as attributes of their contexts.

[Note: attributes of contexts]
A function should pass the tensors that its backward needs to `ctx.save_for_backward`. Some functions, such as
those of the 4-bit layers of bitsandbytes, set attributes instead: `ctx.weight = weight.view(-1)`. Hooks for
saved tensors do not get these, so a view of a slab would pin the slab until backward. The context is a node
of the graph. So the nodes of a module are searched after its forward, and a handle replaces each such view.
While the backward of the node runs, the weight is in the attribute again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.autograd.function import BackwardCFunction

from headwater.core.graphs import nodes_behind
from headwater.core.trees import map_leaves, map_tensors, tensors_in
from headwater.stream.saved_tensors import HandleOf, WeightHandle, own_checkpoints
from headwater.stream.sites import Stages


@final
class ContextWeights:
    """Keeps views of weights out of the contexts of functions; see [Note: attributes of contexts].

    Args:
        has_views: true if views keep the slab of a stage from another stage.
        handle_of: returns the handle of a view of a weight.
        resolve: returns the weight of a handle.
    """

    def __init__(
        self,
        has_views: Callable[[int], bool],
        handle_of: HandleOf,
        resolve: Callable[[WeightHandle], torch.Tensor],
    ) -> None:
        self._has_views = has_views
        self._handle_of = handle_of
        self._resolve = resolve

    def keep_out(self, stages: Stages, output: Any, first: int) -> None:
        """Replace the views in attributes of a module's nodes until the backward of each node.

        Args:
            stages: the stages of the module, whose forward has ended.
            output: its output.
            first: sequence number of the first node of its graph.
        """
        # In a second run, frozen parameters still point to their slab.
        if own_checkpoints.are_innermost() or not any(map(self._has_views, stages)):
            return
        ends = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for node in nodes_behind(ends, first):
            if isinstance(node, BackwardCFunction):
                self._keep_out_of(node)

    def _keep_out_of(self, node: Any) -> None:
        kept = {
            name: map_tensors(self._without_weight, value)
            for name, value in vars(node).items()
            if any(isinstance(self._handle_of(tensor), WeightHandle) for tensor in tensors_in(value))
        }
        if not kept:
            return
        vars(node).update(kept)
        found = weakref.ref(node)  # a node would hold itself through its hooks

        def before(*_: Any) -> None:
            weights = {name: map_leaves(self._with_weight, value) for name, value in kept.items()}
            vars(found()).update(weights)

        def after(*_: Any) -> None:
            vars(found()).update(kept)  # the same graph may have a second backward

        node.register_prehook(before)
        node.register_hook(after)

    def _without_weight(self, tensor: torch.Tensor) -> Any:
        handle = self._handle_of(tensor)
        return _Absent(handle) if isinstance(handle, WeightHandle) else tensor

    def _with_weight(self, _: str, leaf: Any) -> Any:
        return self._resolve(leaf.handle) if isinstance(leaf, _Absent) else leaf


class _Absent:
    """A mark for a weight in an attribute, which is not a dataclass, so that functions on trees keep it."""

    def __init__(self, handle: WeightHandle) -> None:
        self.handle = handle
