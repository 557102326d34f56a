"""Recomputation: forwards that keep only their inputs for backward, and run again there.

[Note: the end of a second run]
When the second run has saved all tensors again, torch's checkpoint ends it by an exception. Its class is a
subclass of `Exception`, and a forward or a library may catch those: einx raises another error instead, and
`try: return fast(x)` with `except Exception: return slow(x)` would compute something else. So the hooks of a
second run raise an exception that is not a subclass of `Exception`, and torch's checkpoint gets its own class
afterwards, whatever the forward has raised.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from headwater.core.copies import copied_arguments
from headwater.core.errors import HeadwaterError, StreamError
from headwater.core.interrupts import interruptible, uninterrupted
from headwater.core.module_calls import replace_forward
from headwater.core.module_parameters import parameters_of
from headwater.core.uncompiled import CompilerOffWarning, uncompiled
from headwater.core.user_functions import functions_in
from headwater.stream.forward_state import ForwardState
from headwater.stream.saved_tensors import innermost_hooks, own_checkpoints
from headwater.stream.sites import Stages
from headwater.stream.transforms import in_transform

_SAVES_NESTED = not hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
"""True if torch's checkpoint can save nested tensors of strided layout. In torch 2.11 it cannot."""


_CHECK = "headwater"
"""Name under which torch's checkpoint finds `_form`."""


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a saved tensor that both runs must have in common.

    They are those of torch's own check, which fails for nested tensors: one of strided layout has no shape,
    and the ragged size of a jagged tensor may be another symbol in the second run.
    """
    if not tensor.is_nested:
        shape: tuple[Any, ...] = tensor.shape
    elif tensor.layout is torch.strided:
        shape = ()
    else:
        shape = tuple(size if type(size) is int else None for size in tensor.shape)
    return shape, tensor.dtype, tensor.device


torch.utils.checkpoint._allowed_determinism_checks_to_fns[_CHECK] = _form


class RecomputedForwards:
    """Makes the forwards of some stages run again in backward, instead of keeping their activations.

    Args:
        modules: the module of each of these stages, and all stages whose weights its forward reads.
        bound: returns a context for a run of the forward that uses these stages; it binds their weights.
        versions: returns the present version of each of the stages.
    """

    def __init__(
        self,
        modules: Sequence[tuple[nn.Module, Stages]],
        bound: Callable[[Stages], AbstractContextManager[None]],
        versions: Callable[[Stages], list[int]],
    ) -> None:
        self._modules: Sequence[tuple[nn.Module, Stages]] = modules
        self._bound = bound
        self._versions = versions
        self._hooked = ExitStack()
        self.hook()

    def hook(self) -> None:
        """Replace the forwards of these modules by recomputed ones, until `unhook`."""
        with ExitStack() as hooked:  # a forward that cannot be replaced must not leave the others behind
            for module, stages in self._modules:
                bound = functools.partial(self._bound, stages)
                versions = functools.partial(self._versions, stages)
                hooked.callback(_recompute_forward(module, bound, versions))
            self._hooked.callback(hooked.pop_all().close)

    def unhook(self) -> None:
        """Restore the original forwards of the modules."""
        self._hooked.close()

    def forget(self) -> None:
        """Drop the modules, after `unhook`."""
        self._modules = ()


def _recompute_forward(
    module: nn.Module,
    bound: Callable[[], AbstractContextManager[None]],
    versions: Callable[[], list[int]],
) -> Callable[[], None]:
    """Replace the forward of a module by one that keeps only its inputs and runs again in backward.

    Args:
        module: the module.
        bound: returns a context for each run of the forward; it binds the weights.
        versions: returns the present versions of the weights.

    Returns:
        A function that restores the original forward.
    """
    forward = module.forward
    own = list(map(id, parameters_of(module)))

    def bound_forward(*args: Any, **kwargs: Any) -> Any:
        with bound():
            return interruptible(forward, *args, **kwargs)

    is_wrapped = True

    @functools.partial(uncompiled, if_compiled=functools.partial(_note_compiler, type(module).__name__))
    @uninterrupted
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not is_wrapped:  # a forward that the user has set calls this one
            return interruptible(forward, *args, **kwargs)
        # The parameters of `functional_call` do not exist in backward any more.
        others = list(map(id, parameters_of(module))) != own
        if others or not _can_run_again():
            return bound_forward(*args, **kwargs)
        # The state is taken before the first run changes it.
        state = ForwardState(module, functions_in((args, kwargs)))
        weights = _UnchangedWeights(module, versions)
        return _RepeatedCall(bound_forward, args, kwargs, state, weights).run()

    restore = replace_forward(module, checkpointed)

    def unwrap() -> None:
        nonlocal is_wrapped
        is_wrapped = False
        restore()

    return unwrap


def _note_compiler(name: str, *_: Any, **__: Any) -> None:
    """Warn that the user's `torch.compile` of a module of the class `name` has no effect."""
    warnings.warn(
        f"activations of this {name} are computed again in backward, so your torch.compile of it has no "
        "effect: compile the functions that it calls, or write activations: keep",
        CompilerOffWarning,
        stacklevel=2,
    )


def _can_run_again() -> bool:
    """True if backward can repeat a forward that begins now."""
    # A transform's tensors do not exist in backward any more.
    in_another = own_checkpoints.is_in_another() or in_transform()
    has_cache = parametrize._cache_enabled > 0  # the cache is gone when the forward runs again
    return torch.is_grad_enabled() and not in_another and not has_cache


class _Tensor:
    """A mark that stands for a tensor among the arguments of a call."""


class _UnchangedWeights:
    """Checks that the second run of a forward reads the same weights as the first.

    Args:
        module: the module whose forward is about to run.
        versions: returns the present versions of its weights.
    """

    def __init__(self, module: nn.Module, versions: Callable[[], list[int]]) -> None:
        self.name = type(module).__name__
        self._versions = versions
        self._first = versions()

    def check(self) -> None:
        """Raise if the weights were changed since the first run.

        Autograd does not notice this: it has saved only the inputs of the forward.

        Raises:
            StreamError: if a weight was updated or written to since then.
        """
        if self._versions() != self._first:
            raise StreamError(
                "weights were changed between this forward and its backward, which runs the forward again",
                where=self.name,
                remedy="run the backward before optimizer.step() and before other changes of weights; or "
                "keep the activations: headwater.backend(..., activations='keep')",
            )


class _RepeatedCall:
    """A call that can be repeated with the original arguments, even if the function changes them.

    Tensors among the arguments are passed to each call, so that this object does not keep them alive. The
    second call begins with the state of the first, and its effects are undone: a list to which a hook appends
    gets each output once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: ForwardState,
        weights: _UnchangedWeights,
    ) -> None:
        self._function = function
        self._state = state
        self._weights = weights
        # On a GPU, backward runs on a thread of autograd, whose context variables have their defaults.
        self._context = contextvars.copy_context()
        self._first: tuple[Any, ...] | None = (args, kwargs)
        self._error: BaseException | None = None
        leaves, self._structure = tree_flatten((args, kwargs))
        self._others = copied_arguments(
            [_Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )
        identities = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        places = {identity: place for place, identity in enumerate(dict.fromkeys(identities))}
        self._places = [places[identity] for identity in identities]

    def run(self) -> Any:
        """Make the first call under torch's checkpoint, which makes the second call in backward.

        Raises:
            StreamError: if torch's checkpoint cannot save one of the tensors.
        """
        tensors = self._tensors()
        has_nested = any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors)
        if has_nested and not _SAVES_NESTED:
            raise StreamError(
                "activations of this module cannot be computed again: its input is a nested tensor, "
                f"which the checkpoint of torch {torch.__version__} cannot save",
                where=self._weights.name,
                remedy="update torch to 2.13, use layout=torch.jagged, or keep the activations: "
                "headwater.backend(..., activations='keep')",
            )
        result = checkpoint(self, *tensors, use_reentrant=False, determinism_check=_CHECK)
        error, self._error = self._error, None
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, each once. Call this before the first call.

        If one tensor is two of the arguments, it must be one object in the second call too:
        `nn.MultiheadAttention` compares its arguments by identity.
        """
        found = [leaf for leaf in tree_leaves(self._first) if isinstance(leaf, torch.Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())

    @uninterrupted
    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is not None:  # the caller's own objects
            (args, kwargs), self._first = self._first, None
            with own_checkpoints.entered():
                try:
                    return self._function(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - `run` raises it
                    # An error that passes through torch's checkpoint leaves its hooks behind in torch 2.11.
                    self._error = error
                    return None
        self._weights.check()
        own = iter([tensors[place] for place in self._places])
        leaves = [next(own) if leaf is _Tensor else leaf for leaf in copied_arguments(self._others)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        ending = _Ending()
        with (
            saved_tensors_hooks(ending.pack, ending.unpack),
            own_checkpoints.entered(),
            self._state.restored(),
        ):
            try:
                # A copy: Python refuses to enter a context that is entered already.
                return self._context.copy().run(self._function, *args, **kwargs)
            except (Exception, _AllSaved) as error:  # the forward may replace `_AllSaved` by any other
                if ending.is_complete and not isinstance(error, HeadwaterError):
                    raise _StopRecomputationError from None
                raise


class _AllSaved(BaseException):
    """Ends a second run. See [Note: the end of a second run]."""


class _Ending:
    """The saved-tensor hooks of a second run, around those of torch's checkpoint.

    See [Note: the end of a second run].

    Attributes:
        is_complete: true after the last tensor that the first run has saved.
    """

    def __init__(self) -> None:
        hooks = innermost_hooks()
        assert hooks is not None, "torch's checkpoint sets hooks for a second run"
        self._pack, self.unpack = hooks
        self.is_complete = False

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.is_complete:
            try:
                return self._pack(tensor)
            except _StopRecomputationError:
                self.is_complete = True
        raise _AllSaved
