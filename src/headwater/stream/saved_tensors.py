"""Tensors that autograd saves for backward: weights are saved as handles, activations may be offloaded.

[Note: autograd and weights]
Autograd saves the weights that backward needs, like any other tensor. A saved view of a slab would pin the
slab until backward. So the view is replaced by a handle (stage, dtype, shape, strides, offset). In backward
the handle is resolved to a view of the slab that holds the stage then.

[Note: parameters that autograd saves]
Weights that stay in the same memory need no such handles. But a backward in Python, of a custom
`autograd.Function` or of a compiled block, may get the saved `nn.Parameter` itself. That object is at rest
then, so the backward would read the fp32 master from the store, and not the weight that the forward has used.
So a handle that refers to the object is saved instead; it is resolved to a plain tensor in the same memory.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from headwater.core.interrupts import uninterrupted
from headwater.plan.writes import changed_in_place

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Two functions: one packs a tensor when autograd saves it, the other unpacks it in backward."""


@dataclasses.dataclass(frozen=True)
class WeightHandle:
    """The description of a view of a weight: stage, offset, shape and strides, but not the values.

    Attributes:
        stage: the weight's stage.
        param: the weight's index in the stage.
        version: the version counter of the parameter when autograd saved the view.
        dtype: dtype, shape, strides and offset of the view in the memory of the stage.
    """

    stage: int
    param: int
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    @classmethod
    def of(cls, view: torch.Tensor, stage: int, param: int, version: int) -> WeightHandle:
        layout = tuple(view.shape), view.stride(), int(view.storage_offset())
        return cls(stage, param, version, view.dtype, *layout)

    def resolve(self, image: torch.Tensor) -> torch.Tensor:
        """Return the described view of `image`, the memory that holds the stage now."""
        whole = image[: image.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, self.storage_offset)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterHandle:
    """A reference to a parameter in memory that its stage never leaves.

    See [Note: parameters that autograd saves].

    Attributes:
        param: the parameter, which is bound now and at rest in backward.
        version: its version counter when autograd saved it.
    """

    param: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ParameterHandle | None:
        """Return the handle of a streamed parameter that is bound; `None` for any other tensor."""
        if not isinstance(tensor, nn.Parameter) or not hasattr(tensor, "home"):
            return None
        return cls(tensor, tensor._version)

    def resolve(self) -> torch.Tensor:
        """Return the weight as a plain tensor.

        Raises:
            StreamError: if the parameter was changed in place after autograd saved it.
        """
        with torch._C.DisableTorchFunctionSubclass():  # else a parameter at rest would read the store
            weight = self.param.detach()
        if weight._version != self.version:
            raise changed_in_place(weight.shape)
        return weight


@dataclasses.dataclass(frozen=True, eq=False)
class HandleAtRest:
    """A reference to a parameter that was at rest when autograd saved it.

    A custom `autograd.Function` saves the parameter itself, and its module may not run then.

    Attributes:
        param: the parameter.
        version: its version counter when autograd saved it.
    """

    param: nn.Parameter
    version: int

    def resolve(self) -> torch.Tensor:
        """Return the values that the store has, or those of a parameter that has left the store.

        Raises:
            StreamError: if the parameter was changed in place after autograd saved it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            present, values = self.param._version, self.param.detach()
        if present != self.version:
            raise changed_in_place(values.shape)
        home = getattr(self.param, "home", None)
        read: torch.Tensor = values if home is None else home.read()
        return read


Handle = WeightHandle | ParameterHandle | HandleAtRest
HandleOf = Callable[[torch.Tensor], Handle | None]
Resolve = Callable[[Any], torch.Tensor]
"""A function that returns the tensor of a handle."""


@contextmanager
def without_weights(
    handle_of: HandleOf,
    resolve: Resolve,
    offload: Callable[[torch.Tensor], Any],
    mark: object = None,
) -> Iterator[None]:
    """Enter a context in which autograd saves handles instead of weights, and activations are offloaded.

    The user's hooks around it, such as those of a checkpoint, get every tensor except weights.

    Args:
        handle_of: returns the handle of a weight; `None` for other tensors.
        resolve: returns the weight of a handle.
        offload: offloads an activation and returns a function that returns it again; `None` if it stays.
        mark: an object that every saved tensor keeps until autograd frees it.
    """
    hooks = _WithoutWeights(handle_of, resolve, offload, innermost_hooks(), mark)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


def keep_weights_out_of_node(handle_of: HandleOf, resolve: Resolve) -> None:
    """Make autograd save handles instead of weights until the end of the node whose backward runs.

    A backward with `create_graph=True` records a graph itself. A saved view of a slab would pin the slab.

    Args:
        handle_of: returns the handle of a weight; `None` for other tensors.
        resolve: returns the weight of a handle.
    """
    enabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    if enabled and not are_weights_kept_out(handle_of, checkpoints=False):
        hooks = _WithoutWeights(handle_of, resolve, lambda tensor: None, innermost_hooks())
        # These hooks are not popped: autograd restores those of the backward's caller before each node.
        torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)


class _WithoutWeights:
    """The pair of saved-tensor hooks that `without_weights` and `keep_weights_out_of_node` set."""

    def __init__(
        self,
        handle_of: HandleOf,
        resolve: Resolve,
        offload: Callable[[torch.Tensor], Any],
        outer: _Hooks | None,
        mark: object = None,
    ) -> None:
        self.handle_of = handle_of
        self._resolve = resolve
        self._offload = offload
        self._outer = outer
        self._mark = mark  # autograd keeps these hooks with each tensor
        self.is_in_checkpoint = own_checkpoints.is_in_another()

    @uninterrupted
    def pack(self, tensor: torch.Tensor) -> Any:
        handle = self.handle_of(tensor)
        if handle is not None:
            return handle
        if self._outer is not None:
            pack, unpack = self._outer
            return _PackedByUser(pack(tensor), unpack)
        moved = self._offload(tensor)
        if moved is not None:
            return moved
        # A node that holds its own output holds itself, so a graph without backward would never be freed. And
        # a streamed parameter that has no handle, because the forward has set its `data`, gets other memory.
        is_kept = tensor.grad_fn is None and not hasattr(tensor, "home")
        return (tensor if is_kept else tensor.detach()), tensor._version

    @uninterrupted
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Handle):
            return self._resolve(packed)
        tensor: torch.Tensor
        if isinstance(packed, _PackedByUser):
            tensor = packed.unpack(packed.value)
            return tensor
        if not isinstance(packed, tuple):
            tensor = packed()
            return tensor
        tensor, version = packed
        if tensor._version != version:  # with hooks, autograd does not check this
            raise changed_in_place(tensor.shape)
        return tensor


@dataclasses.dataclass(frozen=True)
class _PackedByUser:
    """A tensor that the user's hook has packed, and the hook that unpacks it."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


class _OwnCheckpoints(threading.local):
    """A record of the checkpoints that this project makes (for `recompute`), not those of the user.

    [Note: checkpoints in a model]
    A module inside a checkpoint of the user keeps nothing for backward, and its forward runs again there. A
    second checkpoint inside it would hide saved tensors from the user's checkpoint. The user's checkpoint
    would then run less of the module again than in plain PyTorch: the statistics of a BatchNorm would be
    updated once instead of twice.
    """

    def __init__(self) -> None:
        self._entered: list[object] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter a context that marks its code as run by a checkpoint of this project."""
        self._entered.append(innermost_hooks())
        try:
            yield
        finally:
            self._entered.pop()

    def is_in_another(self) -> bool:
        """True if the innermost checkpoint around the caller is one that the user has made."""
        hooks = innermost_hooks()
        if hooks is None or self._is_own(hooks):
            return False
        ours = getattr(hooks[0], "__self__", None)
        if isinstance(ours, _WithoutWeights):
            return ours.is_in_checkpoint
        return hooks[0].__module__ == checkpoint.__module__

    def are_innermost(self) -> bool:
        """True if the innermost hooks for saved tensors are those of a checkpoint of this project."""
        hooks = innermost_hooks()
        return hooks is not None and self._is_own(hooks)

    def _is_own(self, hooks: _Hooks) -> bool:
        return bool(self._entered) and self._entered[-1] == hooks


def are_weights_kept_out(handle_of: HandleOf, *, checkpoints: bool) -> bool:
    """True if the innermost saved-tensor hooks already replace weights by handles.

    Args:
        handle_of: hooks count that `without_weights` has set with this function.
        checkpoints: true if the hooks of a checkpoint of this project count too.
    """
    hooks = innermost_hooks()
    ours = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(ours, _WithoutWeights) and ours.handle_of == handle_of:
        return True
    return checkpoints and own_checkpoints.are_innermost()


def innermost_hooks() -> _Hooks | None:
    """Return the pair of hooks that autograd would call now for a saved tensor, or `None`."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def apart_from_hooks() -> Iterator[None]:
    """Enter a context in which the user's hooks do not get the tensors that autograd saves."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


own_checkpoints = _OwnCheckpoints()
