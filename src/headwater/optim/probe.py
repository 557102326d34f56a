"""A trial of an optimizer: are the results the same if it updates one parameter at a time?

[Note: what an update may depend on]
The weight store runs a step with an object that was built from the arguments of the user's optimizer. It has
one parameter group, and bare tensors instead of the user's parameters. So a step may depend on the gradient,
the state and the options of one parameter, and on nothing else. The trial also refuses what does not change
the results of a few steps: attributes of parameters, random numbers, counts on the object and in its groups,
and changes of variables and objects outside of the optimizer. What the trial changes there is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from headwater.core.effects import state_of_methods
from headwater.core.errors import ConfigError
from headwater.core.python_records import OfCell, OfClass, OfVariables, Record
from headwater.core.python_state import PythonState, undone
from headwater.core.random_states import DEFAULTS, set_state, state_of
from headwater.core.user_functions import is_of_library
from headwater.optim.attributes import copied, is_same, own_attributes
from headwater.optim.catalog import refusal

_SHAPES = ((3, 4), (5, 2), (4, 4))
_GRADIENT_SCALES = (10.0, 0.1, 1.0)  # large first: clipping by a global norm must change the result
_STEPS = 12
"""Number of trial steps. Some optimizers do something else in every fifth or tenth step."""

STATE_REMEDY = (
    "create every tensor of the state in the first step of a parameter, with its final shape, for example "
    "state.setdefault(name, torch.zeros_like(param)): the plan reserves memory for these tensors alone"
)
"""The remedy for an optimizer whose state grows."""

_CODE = (
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(type, staticmethod, classmethod, property),
)
"""Classes of the values of variables that hold code."""

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def check_streamable(
    name: str, build: Build, cls: type[torch.optim.Optimizer], arguments: Iterable[Any] = ()
) -> None:
    """Raise unless the optimizer's results stay bit-identical when it updates one parameter at a time.

    Small parameters are trained in two ways. First together, by one optimizer. Then one at a time, as the
    weight store does it: each update uses new tensors and parameter groups, and only the content of
    `optimizer.state` for the parameter is kept between updates. See [Note: what an update may depend on].

    Args:
        name: name of the optimizer, for errors.
        build: constructs the optimizer for a list of parameters.
        cls: the class of the optimizer.
        arguments: the values of the constructor's arguments.

    Raises:
        ConfigError: if the results differ, the update fails, its state cannot be saved, or the step uses or
            changes anything else.
    """
    with undone(state_of_methods(cls, arguments)):
        _try_out(name, build, lambda: state_of_methods(cls, arguments))


def reads_variables(cls: type[torch.optim.Optimizer], arguments: Iterable[Any] = ()) -> bool:
    """True if the code of an optimizer reads variables that a script may change between two steps.

    Variables that hold code (functions, classes, modules) and those of installed libraries do not count.

    Args:
        cls: the class of the optimizer.
        arguments: the values of the constructor's arguments, which may be functions.
    """
    records = state_of_methods(cls, arguments).records
    return any(not isinstance(value, _CODE) for record in records for value in _variables_of(record))


def _variables_of(record: Record) -> Iterable[Any]:
    """Return the values of the user's variables that are recorded."""
    if isinstance(record, OfVariables) and not is_of_library(record.module):
        return [value for name, value in record.values.items() if not name.startswith("__")]
    if isinstance(record, OfClass):
        return record.attributes.values()
    return [record.content] if isinstance(record, OfCell) else []


def _try_out(name: str, build: Build, reached: Callable[[], PythonState]) -> None:
    """Do the work of `check_streamable`.

    Args:
        name: name of the optimizer, for errors.
        build: constructs the optimizer for a list of parameters.
        reached: returns the present state of the objects that the optimizer's methods reach.

    Raises:
        ConfigError: see `check_streamable`.
    """
    generators = (torch.default_generator, *DEFAULTS)
    random_states = [state_of(generator) for generator in generators]
    watched: list[torch.nn.Parameter] = [_WatchedParameter(value) for value in _values()]
    try:
        alone = torch.nn.Parameter(torch.zeros(_SHAPES[0], dtype=torch.float32, device="cpu"))
        joint, single = build(watched), build([alone])
        _divide_group(joint)
        fixed = _fixed_values(joint)
        _train_jointly(joint, watched)
        outside = reached()  # only now: the first steps may fill caches and create constants
        values, states, shapes = _train_singly(single)
    except Exception as error:  # the user's class can raise any exception
        if isinstance(error, ConfigError):
            raise
        why = f"the update of a single parameter fails ({type(error).__name__}: {error})"
        raise refusal(name, why) from error
    finally:
        drew = [state_of(generator) for generator in generators] != random_states
        for generator, state in zip(generators, random_states, strict=True):
            set_state(generator, state)
    if drew:
        raise refusal(name, "its step draws random numbers")
    _refuse_growth(name, shapes)
    odd = [key for key, value in states[0].items() if not _can_be_saved(value)]
    if odd:
        kind = type(states[0][odd[0]]).__name__
        raise refusal(name, f"expected its state {odd[0]!r} to be a tensor or a number, got {kind}")
    if not all(map(torch.equal, watched, values)) or not is_same(_fixed_values(joint), fixed):
        why = "the update of a parameter depends on other parameters, or on data outside `optimizer.state`"
        raise refusal(name, why)
    if not outside.is_present():
        raise refusal(name, "its step changes variables or objects outside of `optimizer.state`")
    asked = sorted({name for param in watched for name in getattr(param, "asked_for", ())})
    if asked:
        raise refusal(name, f"its step reads the attribute {asked[0]!r} of parameters")
    _refuse_need_of_gradients(name, joint, watched)


def _refuse_need_of_gradients(
    name: str, optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]
) -> None:
    """Raise unless a step skips parameters that have no gradient, as after an update in the store."""
    values = [param.detach().clone() for param in params]
    for param in params:
        param.grad = None
    try:
        step_without_hooks(optimizer)
    except Exception as error:  # the user's class can raise any exception
        why = f"its step fails for parameters whose `grad` is None ({type(error).__name__}: {error})"
        raise refusal(name, why) from error
    if not all(map(torch.equal, params, values)):
        raise refusal(name, "its step changes parameters whose `grad` is None")


class _WatchedParameter(torch.nn.Parameter):
    """A parameter that records the names of missing attributes that the optimizer asks for."""

    def __getattr__(self, name: str) -> Any:
        # The hooks of this package run in a step that calls `super().step()`.
        if not name.startswith(("__", "_headwater")) and name not in ("asked_for", "home"):
            self.__dict__.setdefault("asked_for", set()).add(name)
        raise AttributeError(name)


def _divide_group(optimizer: torch.optim.Optimizer) -> None:
    """Move the last parameter to a second group: a step may depend on the number of the group."""
    if len(optimizer.param_groups) == 1:
        (group,) = optimizer.param_groups
        *first, last = group["params"]
        optimizer.param_groups = [{**group, "params": first}, {**group, "params": [last]}]


def _fixed_values(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return copies of the values that a step must not change: attributes, and options of groups."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return copied(own_attributes(optimizer)), copied(groups)


def check_closure(
    name: str, build: Build, cls: type[torch.optim.Optimizer], arguments: Iterable[Any] = ()
) -> None:
    """Raise unless a step with a closure equals the call of the closure, followed by a step without it.

    Args:
        name: name of the optimizer, for errors.
        build: constructs the optimizer, which `check_streamable` has accepted, for a list of parameters.
        cls: the class of the optimizer.
        arguments: the values of the constructor's arguments.

    Raises:
        ConfigError: if the step calls the closure several times, or uses old gradients or the loss.
    """
    with undone(state_of_methods(cls, arguments)):
        _try_out_with_closure(name, build)


def _try_out_with_closure(name: str, build: Build) -> None:
    """Do the work of `check_closure`."""
    one, other = ([torch.nn.Parameter(value) for value in _values()] for _ in range(2))
    with_closure, without = build(one), build(other)
    calls = []
    for gradients in _gradients():

        def closure(gradients: list[torch.Tensor] = gradients) -> torch.Tensor:
            calls.append(1)
            for param, gradient in zip(one, gradients, strict=True):
                param.grad = gradient.clone()
            return torch.tensor(2.5, device="cpu")

        for param, gradient in zip(other, gradients, strict=True):
            param.grad = gradient
        try:
            _step_of(with_closure)(with_closure, closure)
        except Exception as error:  # the user's class can raise any exception
            raise refusal(name, f"its step with a closure fails ({type(error).__name__}: {error})") from error
        step_without_hooks(without)
    if len(calls) != _STEPS or not all(map(torch.equal, one, other)):
        raise refusal(
            name, "its step uses the loss of its closure, or calls the closure late or several times"
        )


def _refuse_growth(name: str, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Raise if the state tensors of a parameter change in number or shape after the second step.

    Args:
        name: name of the optimizer.
        shapes: the tensors of a state after each step.
    """
    for step, found in enumerate(shapes, start=1):
        if step > 2 and found != shapes[1]:
            new = sorted(found.items() - shapes[1].items())
            what = ", ".join(f"{key!r} of shape {list(shape)}" for key, shape in new) or "fewer tensors"
            raise ConfigError(
                f"{name} cannot be used here: the state of a parameter changes after the second step; "
                f"step {step} keeps {what}",
                remedy=STATE_REMEDY,
            )


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the `step` of an optimizer's class without torch's wrapper.

    The wrapper calls the hooks that the user has registered for all optimizers. They are for the steps of the
    user's optimizers, not for each batch of pieces. The wrapper also takes a tenth of the time of an update.
    """
    _step_of(optimizer)(optimizer)


def _step_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the function `step` of an optimizer's class without torch's wrapper."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if hasattr(step, "hooked") else step


def _train_jointly(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    for gradients in _gradients():
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        step_without_hooks(optimizer)


def _train_singly(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[torch.Tensor], list[dict[str, Any]], list[dict[str, tuple[int, ...]]]]:
    """Update one value at a time; return the values, their states, and after each step the first's shapes."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    values = _values()
    states: list[dict[str, Any]] = [{} for _ in values]
    shapes = []
    # Made a second time, because an optimizer may change gradients in place.
    for gradients in _gradients():
        for index, gradient in enumerate(gradients):
            values[index] = master = values[index].clone()
            optimizer.param_groups = [{"params": [master], **group}]
            optimizer.state.clear()
            if states[index]:
                optimizer.state[master] = states[index]
            master.grad = gradient
            step_without_hooks(optimizer)
            states[index] = _copied(optimizer.state.pop(master, {}))
        shapes.append({key: tuple(value.shape) for key, value in state_tensors(states[0]).items()})
    return values, states, shapes


def state_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer state that the weight store keeps: all but single numbers."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _can_be_saved(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") for shape in _SHAPES]


def _gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    scales = itertools.islice(itertools.cycle(_GRADIENT_SCALES), _STEPS)
    return [
        [
            torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") * scale
            for shape in _SHAPES
        ]
        for scale in scales
    ]
