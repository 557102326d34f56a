"""What happens to the tensors that backward needs: kept, computed again, or moved out and back.

[Note: autograd and weights]
Autograd saves the weights that backward needs as it saves anything else. A saved view of a slab would pin the
slab until backward; so it is replaced by a handle (stage, dtype, shape, strides, offset), which is resolved
against the slab that holds the stage when backward comes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from headwater.core.copies import apart
from headwater.core.effects import effects_undone, functions_of
from headwater.core.errors import StreamError
from headwater.core.uncompiled import uncompiled
from headwater.stream.transforms import in_derivative

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What makes something else of a tensor that autograd saves, and what makes the tensor again."""


@dataclasses.dataclass(frozen=True)
class WeightHandle:
    """A view of a weight, without the weight.

    Attributes:
        stage: its stage.
        param: its index in the stage.
        version: how often it had been changed in place when autograd saved it.
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
        """The view, in the memory that holds the stage now."""
        whole = image[: image.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, self.storage_offset)


@contextmanager
def without_weights(
    handle_of: Callable[[torch.Tensor], WeightHandle | None],
    resolve: Callable[[WeightHandle], torch.Tensor],
    offload: Callable[[torch.Tensor], Any],
) -> Iterator[None]:
    """Within it, what autograd saves holds no weights, and what `offload` takes is moved out.

    Hooks of the user around it, such as those of a checkpoint, get every tensor except weights.

    Args:
        handle_of: what stands for a tensor that is a view of weights; `None` for another.
        resolve: gives the view again, fetching its stage if it must.
        offload: moves an activation out, and returns what brings it back when called; or returns `None`.
    """
    hooks = _WithoutWeights(handle_of, resolve, offload, _innermost_hooks())
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


class _WithoutWeights:
    """A pair of hooks; see `without_weights`."""

    def __init__(
        self,
        handle_of: Callable[[torch.Tensor], WeightHandle | None],
        resolve: Callable[[WeightHandle], torch.Tensor],
        offload: Callable[[torch.Tensor], Any],
        outer: _Hooks | None,
    ) -> None:
        self._handle_of = handle_of
        self._resolve = resolve
        self._offload = offload
        self._outer = outer
        self.is_in_checkpoint = own_checkpoints.is_in_another()

    def pack(self, tensor: torch.Tensor) -> Any:
        handle = self._handle_of(tensor)
        if handle is not None:
            return handle
        if self._outer is not None:
            pack, unpack = self._outer
            return _PackedByUser(pack(tensor), unpack)
        moved = self._offload(tensor)
        return (tensor, tensor._version) if moved is None else moved

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, WeightHandle):
            return self._resolve(packed)
        tensor: torch.Tensor
        if isinstance(packed, _PackedByUser):
            tensor = packed.unpack(packed.value)
            return tensor
        if not isinstance(packed, tuple):
            tensor = packed()
            return tensor
        tensor, version = packed
        if tensor._version != version:  # autograd itself does not look where there are hooks
            raise changed_in_place(tensor)
        return tensor


@dataclasses.dataclass(frozen=True)
class _PackedByUser:
    """A tensor as a hook of the user packed it, and the hook that unpacks it."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


def changed_in_place(tensor: torch.Tensor) -> StreamError:
    """The error for a tensor that is not any more what it was when autograd saved it."""
    return StreamError(
        f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place",
        remedy="as in plain PyTorch: use the operator that gives a new tensor",
    )


def recompute_forward(
    module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]
) -> Callable[[], None]:
    """From now on `module` keeps only its inputs for backward and runs its forward again there.

    Args:
        module: whose forward is wrapped.
        enter: called before each run of the forward: binds the weights.
        leave: called after it.

    Returns:
        What gives the module its own forward back.
    """
    forward = module.forward
    before = vars(module).get("forward")
    own = list(map(id, module.parameters()))

    def bound_forward(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            return forward(*args, **kwargs)
        finally:
            leave()

    is_wrapped = True

    @uncompiled
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not is_wrapped:  # a forward that the user has set calls this one
            return forward(*args, **kwargs)
        others = list(map(id, module.parameters())) != own  # lent by `functional_call`: gone in backward
        kept = own_checkpoints.is_in_another() or in_derivative()  # torch.func refuses checkpoints
        kept = kept or parametrize._cache_enabled > 0  # the cache is gone when the forward runs again
        if others or kept or not torch.is_grad_enabled():
            return bound_forward(*args, **kwargs)
        call = _RepeatedCall(bound_forward, args, kwargs, lambda: functions_of(module))
        buffers = _Buffers(module)
        tensors = call.tensors()
        has_nested = any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors)
        return checkpoint(
            call,
            *tensors,
            use_reentrant=False,
            context_fn=lambda: (_nothing(), buffers),
            determinism_check="none" if has_nested else "default",  # torch's asks for sizes that they lack
        )

    def unwrap() -> None:
        nonlocal is_wrapped
        is_wrapped = False
        if vars(module).get("forward") is not checkpointed:
            return  # the user has replaced it
        if before is None:
            del module.forward
        else:
            module.forward = before

    module.forward = checkpointed
    return unwrap


class _Tensor:
    """Stands for a tensor among other arguments."""


class _RepeatedCall:
    """A call that finds its arguments as they were the first time, whatever the function does to them.

    The tensors among them are given to it each time, so that it does not hold them. The second call leaves no
    trace in what hooks and forwards reach: a list to which a hook appends gets each output once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reaching: Callable[[], Iterable[Any]],
    ) -> None:
        self._function = function
        self._reaching = reaching
        self._first: tuple[Any, ...] | None = (args, kwargs)
        leaves, self._structure = tree_flatten((args, kwargs))
        self._others = apart([_Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        identities = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        places = {identity: place for place, identity in enumerate(dict.fromkeys(identities))}
        self._places = [places[identity] for identity in identities]

    def tensors(self) -> list[torch.Tensor]:
        """Return those among the arguments, each once, before the first call.

        The second call must get one object for two arguments again: `nn.MultiheadAttention` looks at that.
        """
        found = [leaf for leaf in tree_leaves(self._first) if isinstance(leaf, torch.Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:  # the caller's own objects
            (args, kwargs), self._first = self._first, None
            with own_checkpoints.entered():
                return self._function(*args, **kwargs)
        own = iter([tensors[place] for place in self._places])
        leaves = [next(own) if leaf is _Tensor else leaf for leaf in apart(self._others)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with own_checkpoints.entered(), effects_undone(self._reaching()):
            return self._function(*args, **kwargs)


class _OwnCheckpoints(threading.local):
    """Tells checkpoints made here from those of the user.

    [Note: checkpoints in a model]
    A module that already runs in a checkpoint of the user keeps nothing for backward and runs again there. A
    second checkpoint inside would hide that from the first, which would then run less of the module
    again than in plain PyTorch: the statistics of a BatchNorm would be updated once instead of twice.
    """

    def __init__(self) -> None:
        self._entered: list[object] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Mark what runs in the context as run by a checkpoint made here."""
        self._entered.append(_innermost_hooks())
        try:
            yield
        finally:
            self._entered.pop()

    def is_in_another(self) -> bool:
        """True if the innermost checkpoint around the caller is one of the user."""
        hooks = _innermost_hooks()
        if hooks is None or self._is_own(hooks):
            return False
        ours = getattr(hooks[0], "__self__", None)
        if isinstance(ours, _WithoutWeights):
            return ours.is_in_checkpoint
        return hooks[0].__module__ == checkpoint.__module__

    def are_innermost(self) -> bool:
        """True if the innermost hooks for saved tensors are those of a checkpoint made here."""
        hooks = _innermost_hooks()
        return hooks is not None and self._is_own(hooks)

    def _is_own(self, hooks: _Hooks) -> bool:
        return bool(self._entered) and self._entered[-1] == hooks


def are_weights_kept_out() -> bool:
    """True if `without_weights`, or a checkpoint made here, is the first to get what autograd saves now."""
    hooks = _innermost_hooks()
    ours = None if hooks is None else getattr(hooks[0], "__self__", None)
    return isinstance(ours, _WithoutWeights) or own_checkpoints.are_innermost()


def _innermost_hooks() -> _Hooks | None:
    """Return the pair of hooks for saved tensors that autograd would call now, or None."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


@contextmanager
def apart_from_hooks() -> Iterator[None]:
    """Keep tensors that autograd saves in the context from hooks of the user around it."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


own_checkpoints = _OwnCheckpoints()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Buffers:
    """A module's buffers before a forward; while entered, as often as it is, they are what they were.

    So a second forward begins with them, and leaves no trace.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._copies()
        self._now = self._before

    def _copies(self) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]]:
        owners = (owner._buffers for owner in self._module.modules())
        return [(own, k, b, b.clone()) for own in owners for k, b in own.items() if b is not None]

    def __enter__(self) -> None:
        self._now = self._copies()
        _put(self._before)

    def __exit__(self, *exception: object) -> None:
        _put(self._now)


@torch.no_grad()
def _put(copies: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]]) -> None:
    for own, name, buffer, value in copies:
        own[name] = buffer
        if not torch.equal(buffer, value):  # what did not change may be saved for another backward
            buffer.copy_(value)
