"""Recomputation: forwards that keep only their inputs for backward, and run again there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from headwater.core.copies import apart
from headwater.core.effects import effects_undone, functions_of
from headwater.core.uncompiled import uncompiled
from headwater.stream.saved_tensors import own_checkpoints
from headwater.stream.transforms import in_transform


class RecomputedForwards:
    """The stages of a model whose forwards run again in backward.

    Args:
        modules: the module of each of these stages.
        enter: called with a stage before each run of its forward; binds the weights.
        leave: called with the stage afterwards.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        enter: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        self._modules = modules
        self._enter = enter
        self._leave = leave
        self._hooked = ExitStack()
        self.hook()

    def hook(self) -> None:
        """Replace the forwards by recomputed ones, until `unhook`."""
        for stage, module in self._modules.items():
            enter, leave = functools.partial(self._enter, stage), functools.partial(self._leave, stage)
            self._hooked.callback(_recompute_forward(module, enter, leave))

    def unhook(self) -> None:
        """Restore the original forwards of the modules."""
        self._hooked.close()


def _recompute_forward(
    module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]
) -> Callable[[], None]:
    """Replace the forward of a module by one that keeps only its inputs and runs again in backward.

    Args:
        module: the module.
        enter: called before each run of the forward; binds the weights.
        leave: called after each run.

    Returns:
        A function that restores the original forward.
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
        others = list(map(id, module.parameters())) != own  # those of `functional_call` are gone in backward
        kept = own_checkpoints.is_in_another() or in_transform()  # its tensors do not exist in backward
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
            determinism_check="none" if has_nested else "default",  # torch's check needs their sizes
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
    """A mark for the place of a tensor among other arguments."""


class _RepeatedCall:
    """A call that can be repeated with the original arguments, even if the function changes them.

    Tensors among the arguments are passed to each call, so that this object does not keep them alive. All
    effects of the second call on objects that hooks and forwards can reach are undone: a list to which a hook
    appends gets each output once.
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
        """Return the tensors among the arguments, each once. Call this before the first call.

        If one tensor is two of the arguments, it must be one object in the second call too:
        `nn.MultiheadAttention` compares its arguments by identity.
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


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Buffers:
    """A context that restores the buffers that a module had before its first forward; may be entered again.

    The second forward starts with these buffers, and its changes to them are undone.
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
        if not torch.equal(buffer, value):  # an unchanged buffer may be saved for another backward
            buffer.copy_(value)
