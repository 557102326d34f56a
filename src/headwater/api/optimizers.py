"""Steps of torch's optimizers over streamed parameters: the weight store runs them and keeps the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from headwater.api.gradients import are_finite, gradients_of, unscale
from headwater.api.loop_steps import leaves_store, run_in_loop, runs_in_loop
from headwater.api.optimizer_files import add_stored_state, take_stored_state
from headwater.api.optimizer_record import record_of
from headwater.api.optimizer_state import install, reinstall
from headwater.api.references import warn_of_kept_views
from headwater.api.registry import find_model, model_of
from headwater.api.step_checks import check_kinds, check_not_consumed, check_ranks
from headwater.api.stored_state import Optimizer, params_of
from headwater.api.transaction import is_open
from headwater.core.errors import ConfigError
from headwater.core.interrupts import uninterrupted
from headwater.core.modes import present_autocast
from headwater.core.process_value import ProcessValue
from headwater.core.stage import ParamKey
from headwater.optim.spec import group_options
from headwater.store.update import Update
from headwater.stream.home import Home
from headwater.stream.left_gradients import collect_left
from headwater.stream.parameters import ParameterAtRest

if TYPE_CHECKING:
    from headwater.api.streamed import StreamedModel


@dataclasses.dataclass
class _StepOptions:
    """The arguments of `step`, and its result `applied`."""

    max_norm: float | None = None
    max_value: float | None = None
    loss_scale: float = 1.0
    skip_non_finite: bool = False
    applied: bool = True

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "applied"}


_options = ProcessValue(_StepOptions())
"""Options of the step that runs now. Global, because `optimizer.step()` has no arguments for them."""


def step(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    loss_scale: float = 1.0,
    skip_non_finite: bool = False,
) -> bool:
    """Unscale and clip the gradients, and call `optimizer.step()`.

    Args:
        optimizer: an optimizer of streamed or plain parameters.
        max_norm: clip the global 2-norm of the gradients to this.
        max_value: then clip each element to ± this.
        loss_scale: the factor by which the loss was multiplied.
        skip_non_finite: skip the step if a gradient is not finite, instead of raising an error.

    Returns:
        True if the step was applied, false if it was skipped.

    Raises:
        NonFiniteError: if a streamed gradient is not finite and such steps are not skipped.
    """
    collect(optimizer)  # first: a parameter with a gradient that the store cannot use becomes a plain one
    asked = _StepOptions(max_norm, max_value, loss_scale, skip_non_finite)
    stores = {id(home.store) for home in homes_of(optimizer)}
    has_plain = any(not isinstance(param, ParameterAtRest) for param in params_of(optimizer))
    # Clipping needs the norm of all gradients. A store knows only the norm of the gradients that it holds.
    if len(stores) == 1 and not has_plain and not runs_in_loop(optimizer):
        with _options.replaced(asked):
            optimizer.step()
        return asked.applied
    if not _prepare_gradients(optimizer, asked):
        return False
    optimizer.step()
    return True


def collect(optimizer: Optimizer) -> None:
    """Move gradients that autograd has left in parameters to the store."""
    for param in params_of(optimizer):
        if isinstance(param, ParameterAtRest):
            collect_left(param)


def _prepare_gradients(optimizer: Optimizer, options: _StepOptions) -> bool:
    """Unscale and clip in place, as plain PyTorch does; return false if the step must be skipped."""
    gradients = gradients_of(optimizer)
    unscale(gradients, options.loss_scale)
    if options.skip_non_finite and not are_finite(gradients):
        return False
    if options.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), options.max_norm)
    if options.max_value is not None:
        torch.nn.utils.clip_grad_value_(params_of(optimizer), options.max_value)
    return True


def homes_of(optimizer: Optimizer) -> Iterator[Home]:
    """Yield the places of an optimizer's streamed parameters."""
    for param in params_of(optimizer):
        if isinstance(param, ParameterAtRest) and find_model(param.home.store) is not None:
            yield param.home


def commit(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Commit the optimizer's step to the stores of its streamed parameters, if it has any.

    Args:
        optimizer: the optimizer.
        args: the arguments of its `step`.
        kwargs: its keyword arguments.
    """
    if next(homes_of(optimizer), None) is None or runs_in_loop(optimizer):
        return
    if leaves_store(optimizer, args, kwargs):
        _move_to_loop(optimizer)
        return
    check_ranks(optimizer, _options.value.arguments())
    adopt(optimizer)  # before any store is read: it may replace stores
    if runs_in_loop(optimizer):
        _move_to_loop(optimizer)
        return
    check_not_consumed(homes_of(optimizer))
    if _scaler_found_overflow(optimizer):
        for home in homes_of(optimizer):
            home.set_gradient(None)
        return
    for model, parts in _parts(optimizer).items():
        _commit_to(model, optimizer, parts)


def _move_to_loop(optimizer: Optimizer) -> None:
    """Move the state of an optimizer, whose steps run in the loop from now on, to host memory.

    If this step clips or unscales gradients, the store would have done so. So it is done here.
    """
    for model in {model_of(home.store) for home in homes_of(optimizer)}:
        model.optimizers.give_up(optimizer)
    if not _prepare_gradients(optimizer, _options.value):
        _options.value.applied = False
        for param in params_of(optimizer):
            param.grad = None


def _commit_to(
    model: StreamedModel, optimizer: Optimizer, parts: Mapping[ParamKey, Mapping[str, Any]]
) -> None:
    """Commit the optimizer's step to the store of one model.

    Args:
        model: the model.
        optimizer: the optimizer.
        parts: the options of each parameter that the optimizer updates in this store.
    """
    store = model.current.present.store
    check_kinds(optimizer, store, parts)
    update = _update(optimizer, store.ledger.num_commits + 1)
    committed = store.commit(
        update, {key: dataclasses.replace(update, options=options) for key, options in parts.items()}
    )
    if record_of(optimizer).updates_at_once:
        model.steps.updates_at_once = True
    if not is_open():
        # Not in a transaction, which may still undo the commit: its end applies the updates.
        model.steps.apply_updates()
    _options.value.applied = committed.applied
    updated = [
        param
        for param in params_of(optimizer)
        if isinstance(param, ParameterAtRest)
        and param.home.store is store
        and param.home.key in committed.params
    ]
    torch.autograd.graph.increment_version(updated)  # as an update in place does
    # In plain PyTorch the gradients stay until they are zeroed. Here the store has consumed them, and using
    # them again before they are zeroed is an error.
    status = store.gradients.status
    status.consume(param.home.key for param in updated)
    status.is_stepping = True
    record_of(optimizer).stepping.append(store)
    warn_of_kept_views(updated, update.step)


def _update(optimizer: Optimizer, step: int) -> Update:
    """Return the update of commit number `step`, without the options of single parameters."""
    options = _options.value
    return Update(
        step,
        {},
        max_norm=options.max_norm,
        max_value=options.max_value,
        loss_scale=options.loss_scale * _scale_left_by_scaler(optimizer),
        skip_non_finite=options.skip_non_finite,
        autocast=present_autocast(),
    )


def _scaler_found_overflow(optimizer: Optimizer) -> bool:
    """True if torch's `GradScaler` found an overflow, and expects a fused optimizer to skip the step."""
    return bool(getattr(optimizer, "found_inf", 0))


def _scale_left_by_scaler(optimizer: Optimizer) -> float:
    """Return the loss scale if torch's `GradScaler` expects a fused optimizer to unscale; otherwise 1."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def _parts(optimizer: Optimizer) -> dict[StreamedModel, dict[ParamKey, dict[str, Any]]]:
    """Return, for each streamed model, parameter -> the options with which `optimizer` updates it."""
    parts: dict[StreamedModel, dict[ParamKey, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        options = group_options(optimizer, group)
        for param in group["params"]:
            if isinstance(param, ParameterAtRest):
                model = model_of(param.home.store)
                parts.setdefault(model, {})[param.home.stage, param.home.index] = options
    return parts


@uninterrupted
def adopt(optimizer: Optimizer) -> None:
    """Move the state of an optimizer's streamed parameters to their store.

    Raises:
        ConfigError: if streaming cannot serve the optimizer.
    """
    record = record_of(optimizer)
    if not record.has_file_hooks:
        record.has_file_hooks = True
        optimizer.register_state_dict_post_hook(add_stored_state)
        optimizer.register_load_state_dict_pre_hook(take_stored_state)
        optimizer.register_load_state_dict_post_hook(reinstall)
    install(optimizer)
    for model in {model_of(home.store) for home in homes_of(optimizer)}:
        model.optimizers.update_with(optimizer)
    # After `update_with`, which may replace the stores.
    states = install(optimizer)
    try:
        states.check_storable()
    except ConfigError as error:
        run_in_loop(optimizer, error)
    else:
        states.store()
