"""A trial of an optimizer: are the results the same if it updates one parameter at a time?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headwater.core.errors import ConfigError
from headwater.optim.catalog import refusal

_SHAPES = ((3, 4), (5, 2))
_GRADIENT_SCALES = (10.0, 0.1, 1.0)  # large first: clipping by a global norm must change the result
_STEPS = 12
"""Number of trial steps. Some optimizers do something else in every fifth or tenth step."""

STATE_REMEDY = (
    "create every tensor of the state in the first step of a parameter, with its final shape, for example "
    "state.setdefault(name, torch.zeros_like(param)): the plan reserves memory for these tensors alone"
)
"""The remedy for an optimizer whose state grows."""

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def check_streamable(name: str, build: Build) -> None:
    """Raise unless the optimizer's results stay bit-identical when it updates one parameter at a time.

    Two small parameters are trained in two ways. First together, by one optimizer. Then one at a time, as the
    weight store does it: each update uses new tensors and parameter groups, and only the content of
    `optimizer.state` for the parameter is kept between updates.

    Args:
        name: name of the optimizer, for errors.
        build: constructs the optimizer for a list of parameters.

    Raises:
        ConfigError: if the results differ, the update fails, or its state cannot be saved.
    """
    params = [torch.nn.Parameter(value) for value in _values()]
    joint, single = build(params), build([torch.nn.Parameter(torch.zeros(_SHAPES[0]))])
    try:
        _train_jointly(joint, params)
        values, states, shapes = _train_singly(single)
    except Exception as error:  # the step of the user's class can raise any exception
        why = f"the update of a single parameter fails ({type(error).__name__}: {error})"
        raise refusal(name, why) from error
    _refuse_growth(name, shapes)
    odd = [key for key, value in states[0].items() if not _can_be_saved(value)]
    if odd:
        kind = type(states[0][odd[0]]).__name__
        raise refusal(name, f"expected its state {odd[0]!r} to be a tensor or a number, got {kind}")
    if not all(map(torch.equal, params, values)):
        why = "the update of a parameter depends on other parameters, or on data outside `optimizer.state`"
        raise refusal(name, why)


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
    step: Any = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)


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
    return [torch.randn(shape, generator=generator) for shape in _SHAPES]


def _gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    scales = itertools.islice(itertools.cycle(_GRADIENT_SCALES), _STEPS)
    return [[torch.randn(shape, generator=generator) * scale for shape in _SHAPES] for scale in scales]
