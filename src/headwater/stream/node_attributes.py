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
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from headwater.core.graphs import nodes_behind
from headwater.core.trees import map_leaves, map_tensors, tensors_in
from headwater.stream.saved_tensors import WeightHandle

HandleOf = Callable[[torch.Tensor], Any]


def keep_weights_out_of_attributes(
    output: Any, first: int, handle_of: HandleOf, resolve: Callable[[WeightHandle], torch.Tensor]
) -> None:
    """Replace the views of weights in attributes of a module's nodes until the backward of each node.

    See [Note: attributes of contexts].

    Args:
        output: the output of the module.
        first: sequence number of the module's first node.
        handle_of: returns the handle of a view of a weight.
        resolve: returns the weight of a handle.
    """
    ends = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    for node in nodes_behind(ends, first):
        if isinstance(node, BackwardCFunction):
            _keep_weights_out(node, handle_of, resolve)


def _keep_weights_out(
    node: Any, handle_of: HandleOf, resolve: Callable[[WeightHandle], torch.Tensor]
) -> None:
    def without_weight(tensor: torch.Tensor) -> Any:
        handle = handle_of(tensor)
        return _Absent(handle) if isinstance(handle, WeightHandle) else tensor

    def with_weight(_: str, leaf: Any) -> Any:
        return resolve(leaf.handle) if isinstance(leaf, _Absent) else leaf

    kept = {
        name: map_tensors(without_weight, value)
        for name, value in vars(node).items()
        if any(isinstance(handle_of(tensor), WeightHandle) for tensor in tensors_in(value))
    }
    if not kept:
        return
    vars(node).update(kept)
    found = weakref.ref(node)  # a node would hold itself through its hooks

    def before(*_: Any) -> None:
        vars(found()).update({name: map_leaves(with_weight, value) for name, value in kept.items()})

    def after(*_: Any) -> None:
        vars(found()).update(kept)  # the same graph may have a second backward

    node.register_prehook(before)
    node.register_hook(after)


class _Absent:
    """A mark for a weight in an attribute, which is not a dataclass, so that functions on trees keep it."""

    def __init__(self, handle: WeightHandle) -> None:
        self.handle = handle
