"""Forwards that keep only their inputs for backward, and run again there."""

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
        enter: called with a stage before each run of its forward: binds the weights.
        leave: called with it afterwards.
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
        """Let the forwards run again in backward, until `unhook`."""
        for stage, module in self._modules.items():
            enter, leave = functools.partial(self._enter, stage), functools.partial(self._leave, stage)
            self._hooked.callback(_recompute_forward(module, enter, leave))

    def unhook(self) -> None:
        """Give the modules their own forwards back."""
        self._hooked.close()


def _recompute_forward(
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
        kept = own_checkpoints.is_in_another() or in_transform()  # its tensors are gone in backward
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
