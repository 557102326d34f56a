"""The hooks of torch around each step of an optimizer, by which the step reaches the weight stores."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headwater.api.optimizer_record import record_of
from headwater.api.optimizers import collect, commit, homes_of
from headwater.api.registry import compiled_models
from headwater.api.step_checks import check_between_forwards
from headwater.api.stored_state import Optimizer, params_of
from headwater.core.interrupts import uninterrupted
from headwater.core.module_parameters import parameters_of
from headwater.core.uncompiled import CompilerOffWarning, never_compile, uncompiled
from headwater.stream.parameters import running_steps


class NotStreamedWarning(UserWarning):
    """Warns that the weights of a compiled module are not streamed, because the module is never called."""


class Amendment(Protocol):
    """Interface: changes gradients before an optimizer uses them."""

    def before_step(self, optimizer: Optimizer, /) -> None:
        """Change the gradients that `optimizer` is about to use; called before each of its steps."""
        ...


_AMENDMENT = "_headwater_amendment"


def amend_with(param: torch.nn.Parameter, amendment: Amendment) -> None:
    """Call `amendment.before_step` before each step of an optimizer of `param`, while `param` lives."""
    setattr(param, _AMENDMENT, amendment)


def _amend(optimizer: Optimizer) -> None:
    """Change the gradients by the amendments of the optimizer's parameters, each once."""
    amendments = [getattr(param, _AMENDMENT, None) for param in params_of(optimizer)]
    for amendment in dict.fromkeys(each for each in amendments if each is not None):
        amendment.before_step(optimizer)


def _note_compiler(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn that the user's `torch.compile` of a step has no effect, if the step has streamed parameters.

    torch's compiler makes assumptions about the state of an optimizer that do not hold for a state in the
    store, so it does not get the step at all.
    """
    if next(homes_of(optimizer), None) is None:
        return
    name = type(optimizer).__name__
    never_compile(type(optimizer).step)
    warnings.warn(
        f"your torch.compile has no effect on {name}.step from now on, for any {name} of this process, "
        "because the weight store updates streamed parameters: do not compile this step",
        CompilerOffWarning,
        stacklevel=2,
    )


@functools.partial(uncompiled, if_compiled=_note_compiler)
@uninterrupted
def _place_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Register the hooks around the step that begins now (a hook of torch for every optimizer).

    `_before_step` runs after the user's hooks, which may still change gradients and options. `_after_step`
    runs before the user's hooks, which must not find the gradients missing.
    """
    if _is_nested(optimizer):
        return
    record = record_of(optimizer)
    for handle in record.step_hooks:
        handle.remove()
    _end_step(optimizer)  # the step before may have failed
    before = optimizer.register_step_pre_hook(_before_step)
    after = optimizer.register_step_post_hook(_after_step)
    # torch calls global hooks first, then those of the optimizer in this order.
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
    record.step_hooks = before, after


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Commit the updates of streamed parameters before an optimizer's step (a hook of torch).

    The optimizer then finds `grad is None` for these parameters and skips them. If `step` gets a closure, the
    closure computes the gradients, and it may call the model for the first time, which begins the streaming.
    So the updates are committed after the closure.

    Returns:
        The new arguments of `step`, or `None` to leave them as they are.
    """
    if _is_nested(optimizer):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _commit(optimizer, args[1:], kwargs)
        return None

    def closure_and_commit() -> Any:
        loss = closure()
        _commit(optimizer, args[1:], kwargs)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_and_commit}
    return (args[0], closure_and_commit, *args[2:]), kwargs


@uncompiled
@functools.partial(uninterrupted, raises=False)  # plain parameters of the optimizer are updated after it
def _commit(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Change the gradients by the amendments, and commit the step to the stores of streamed parameters."""
    _warn_of_uncalled_models(optimizer)
    check_between_forwards(optimizer)
    collect(optimizer)
    _amend(optimizer)  # for all parameters: masks apply to plain ones too
    commit(optimizer, args, kwargs)


def _warn_of_uncalled_models(optimizer: Optimizer) -> None:
    """Warn if the optimizer trains parameters of a compiled module that was never called."""
    for model in compiled_models():
        if not model.awaits_call:
            continue
        own = {id(param) for param in parameters_of(model.model)}
        if any(id(param) in own and param.grad is not None for param in params_of(optimizer)):
            name = type(model.model).__name__
            warnings.warn(
                f"this compiled {name} trains in plain PyTorch, because the module itself was never called; "
                "only calls such as model(batch) begin the streaming, not those by functional_call: if your "
                "code calls parts of the model, or other methods such as model.encode(batch), compile each "
                "part that it calls",
                NotStreamedWarning,
                stacklevel=2,
            )


@uncompiled
@uninterrupted
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """End an optimizer's step (a hook of torch): the gradients that it has consumed can be seen again."""
    if not _is_nested(optimizer):
        _end_step(optimizer)


def _is_nested(optimizer: Optimizer) -> bool:
    """True if the step for which torch calls a hook was called by another step of the same optimizer.

    The `step` of a subclass may change gradients and then call `super().step()`. torch runs the hooks for
    both, but the outer step has committed the update of this class.
    """
    return sum(each is optimizer for each in running_steps()) > 1


def _end_step(optimizer: Optimizer) -> None:
    record = record_of(optimizer)
    stepping, record.stepping = record.stepping, []
    for store in stepping:
        store.gradients.status.is_stepping = False


register_optimizer_step_pre_hook(_place_hooks)
