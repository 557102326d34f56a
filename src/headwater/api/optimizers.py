"""Makes torch's optimizers work with streamed parameters: the weight store runs steps and keeps state."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headwater.api.gradients import are_finite, gradients_of, unscale
from headwater.api.moments import lazy_state
from headwater.api.optimizer_state import install, reinstall
from headwater.api.ranks import is_divided
from headwater.api.references import warn_of_kept_views
from headwater.api.registry import find_model, is_state_replaced, model_of
from headwater.api.same_model import check_same_options
from headwater.api.stored_state import is_served, params_of
from headwater.api.transaction import is_open
from headwater.core.errors import StreamError
from headwater.core.process_value import ProcessValue
from headwater.core.stage import ParamKey
from headwater.fabric.membership import current
from headwater.optim.catalog import takes_dense_gradients, takes_sparse_gradients
from headwater.optim.spec import group_options
from headwater.store.gradients.port import consumed_error
from headwater.store.store import WeightStore
from headwater.store.update import Update
from headwater.stream.home import Home
from headwater.stream.parameters import ParameterAtRest

if TYPE_CHECKING:
    from headwater.api.streamed import StreamedModel

Optimizer = torch.optim.Optimizer


class Amendment(Protocol):
    """Interface: changes gradients before an optimizer uses them."""

    def before_step(self, optimizer: Optimizer, /) -> None:
        """Change the gradients that `optimizer` is about to use; called before each of its steps."""
        ...


_AMENDMENT = "_headwater_amendment"


def amend_with(param: torch.nn.Parameter, amendment: Amendment) -> None:
    """Call `amendment.before_step` before each step of an optimizer of `param`, while `param` lives."""
    setattr(param, _AMENDMENT, amendment)


@dataclasses.dataclass
class _StepOptions:
    """The arguments of `step`, and its result `applied`."""

    max_norm: float | None = None
    max_value: float | None = None
    loss_scale: float = 1.0
    skip_non_finite: bool = False
    applied: bool = True


_options = ProcessValue(_StepOptions())
"""Options of the step that runs now. Global, because `optimizer.step()` has no arguments for them."""
_adopted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_used: weakref.WeakKeyDictionary[Optimizer, list[ParameterAtRest]] = weakref.WeakKeyDictionary()
"""Optimizer -> the parameters that its step, which runs now, has updated."""


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
    asked = _StepOptions(max_norm, max_value, loss_scale, skip_non_finite)
    models = {id(home.store) for home in _homes(optimizer)}
    plain = any(not isinstance(param, ParameterAtRest) for param in params_of(optimizer))
    # Clipping needs the norm of all gradients. A store knows only the norm of those that it holds.
    if len(models) == 1 and not plain:
        with _options.replaced(asked):
            optimizer.step()
        return asked.applied
    if not _prepare_gradients(optimizer, asked):
        return False
    optimizer.step()
    return True


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


def _homes(optimizer: Optimizer) -> Iterator[Home]:
    for param in params_of(optimizer):
        if isinstance(param, ParameterAtRest) and find_model(param.home.store) is not None:
            yield param.home


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Commit the updates of streamed parameters before any optimizer's step (a hook of torch).

    The optimizer then finds `grad is None` for these parameters and skips them. If `step` gets a closure, the
    closure computes the gradients, and it may call the model for the first time, which begins the streaming.
    So the updates are committed after the closure.

    Returns:
        The new arguments of `step`, or `None` to leave them as they are.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _commit(optimizer)
        return None

    def closure_and_commit() -> Any:
        loss = closure()
        _commit(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure_and_commit}


def _commit(optimizer: Optimizer) -> None:
    """Commit the optimizer's step to the stores of its streamed parameters, if it has any."""
    # Before the search for streamed parameters: masks apply to plain parameters too.
    amendments = [getattr(param, _AMENDMENT, None) for param in params_of(optimizer)]
    for amendment in dict.fromkeys(each for each in amendments if each is not None):
        amendment.before_step(optimizer)
    if next(_homes(optimizer), None) is None:
        return
    _check_parts(optimizer)
    adopt(optimizer)
    _used.pop(optimizer, None)  # entries of a step that failed
    consumed = next((home for home in _homes(optimizer) if home.gradient_is_consumed), None)
    if consumed is not None:
        raise consumed_error(consumed.spec.name)
    if _scaler_found_overflow(optimizer):
        for home in _homes(optimizer):
            home.set_gradient(None)
        return
    for model, parts in _parts(optimizer).items():
        # Read after `adopt`, which may have replaced the store.
        store = model.current.present.store
        _check_kinds(optimizer, store, parts)
        update = Update(
            store.ledger.num_commits + 1,
            {},
            max_norm=_options.value.max_norm,
            max_value=_options.value.max_value,
            loss_scale=_options.value.loss_scale * _scale_left_by_scaler(optimizer),
            skip_non_finite=_options.value.skip_non_finite,
        )
        committed = store.commit(
            update, {key: dataclasses.replace(update, options=options) for key, options in parts.items()}
        )
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
        _used.setdefault(optimizer, []).extend(updated)
        warn_of_kept_views(updated, update.step)


def _check_parts(optimizer: Optimizer) -> None:
    """With several ranks, check that all make the same update, and that the batch was divided among them.

    Raises:
        StreamError: if batches are not divided, if options differ between ranks, or if a parameter is trained
            that is not streamed.
    """
    if current().size == 1:
        return
    if not is_divided():
        raise StreamError(
            "no batch was divided among the ranks, so all of them computed the same gradient",
            where="optimizer.step()",
            remedy="take the batches from headwater.utils.data.DataExecutor(loader), or this rank's part of "
            "one from headwater.distributed.take_part(batch)",
        )
    names = {id(p): p.home.spec.name for p in params_of(optimizer) if isinstance(p, ParameterAtRest)}
    asked = {key: value for key, value in dataclasses.asdict(_options.value).items() if key != "applied"}
    check_same_options(current(), optimizer, names, asked)
    for param in params_of(optimizer):
        if not isinstance(param, ParameterAtRest) and param.grad is not None:
            raise StreamError(
                f"a trained parameter of shape {list(param.shape)} is not in a compiled model, so each rank "
                "would change a separate copy",
                where="optimizer.step()",
                remedy="make it a part of a model, and compile this model",
            )


def _check_kinds(
    optimizer: Optimizer, store: WeightStore, parts: Mapping[ParamKey, Mapping[str, Any]]
) -> None:
    """Check that the optimizer accepts the present gradients, sparse or dense.

    Raises:
        StreamError: if it does not.
    """
    name = type(optimizer).__name__
    for key in store.gradients.status.present.intersection(parts):
        is_sparse = key in store.gradients.status.sparse
        if not (takes_sparse_gradients(name, parts[key]) if is_sparse else takes_dense_gradients(name)):
            raise StreamError(
                f"{name} cannot use a {'sparse' if is_sparse else 'dense'} gradient with these options",
                where=store.spec(key).name,
                remedy="sparse gradients: SparseAdam, or SGD or Adagrad without momentum and weight decay; "
                "dense ones: any other optimizer",
            )


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark gradients as consumed after any optimizer's step (a hook of torch).

    In plain PyTorch the gradients stay until they are zeroed. Here the store has consumed them, and using
    them again before they are zeroed is an error.
    """
    for param in _used.pop(optimizer, []):
        param.home.store.gradients.status.consume([param.home.key])


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


def adopt(optimizer: Optimizer) -> None:
    """Move the state of an optimizer's streamed parameters to their store.

    Raises:
        ConfigError: if streaming cannot serve the optimizer.
    """
    if optimizer not in _adopted:
        _adopted.add(optimizer)
        optimizer.register_state_dict_post_hook(_add_state)
        optimizer.register_load_state_dict_pre_hook(_take_state)
        optimizer.register_load_state_dict_post_hook(reinstall)
    install(optimizer)
    for model in {model_of(home.store) for home in _homes(optimizer)}:
        model.optimizers.update_with(optimizer)
    # After `update_with`, which may replace the stores.
    install(optimizer).store()


def _add_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add optimizer state that is in stores to a `state_dict` of the optimizer."""
    states = {key: dict(state) for key, state in state_dict["state"].items()}
    if not is_state_replaced(optimizer):
        for number, param in enumerate(params_of(optimizer)):
            stored = lazy_state(optimizer, param) if isinstance(param, ParameterAtRest) else None
            if stored:
                states[number] = stored
    state_dict["state"] = {number: states[number] for number in sorted(states)}


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load the states of streamed parameters into stores, and return the `state_dict` without them."""
    present = install(optimizer)
    params = list(params_of(optimizer))
    state = dict(state_dict["state"])
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    # Before any state is loaded: another layout replaces the store.
    _expect(optimizer, state_dict)
    # Not strict: torch compares the groups after this hook, and raises its own error.
    for number, param in zip(saved, params, strict=False):
        if is_served(param, optimizer):
            loaded = state.pop(number, None)
            present.load(param, loaded and _with_dtypes(param, loaded, number, state_dict["param_groups"]))
    return {**state_dict, "state": state}


def _with_dtypes(
    param: ParameterAtRest, state: Mapping[str, Any], number: int, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a state that is being loaded, with its scalars in the dtypes that torch's loading uses."""

    def converted(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            return value
        return Optimizer._process_value_according_to_param_policy(param, value, number, groups, name)

    return {name: converted(name, value) for name, value in state.items()}


def _expect(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Change the layout of stores so that the optimizer state that is being loaded fits in."""
    groups = [(group, number) for group in state_dict["param_groups"] for number in group["params"]]
    loaded: dict[StreamedModel, dict[ParamKey, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for (group, number), param in zip(groups, params_of(optimizer), strict=False):
        if is_served(param, optimizer) and state_dict["state"].get(number):
            home = param.home
            states = loaded.setdefault(model_of(home.store), {})
            states[home.stage, home.index] = group, state_dict["state"][number]
    for model, states in loaded.items():
        model.optimizers.expect_states(states)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
