"""Parameters without values: on the meta device, told where their values are, filled when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_VALUES = "_headwater_values"
"""The attribute of an empty parameter that holds its values, mostly a lazy tensor."""


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Within it modules are built without memory for their parameters, which are on the meta device.

    Buffers are real: what a constructor computes, such as rotary frequencies, no checkpoint brings. Give the
    parameters their values with `load_pretrained`, then compile the model.
    """
    register = nn.Module.register_parameter
    empty_of = WeakTensorKeyDictionary()  # a parameter that is registered twice stays one
    recurrent: list[nn.RNNBase] = []

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in empty_of:
                empty_of[param] = _like(param, torch.empty_like(param, device="meta"))
            module._parameters[name] = empty_of[param]
            if isinstance(module, nn.RNNBase):
                recurrent.append(module)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for layer in recurrent:
            # What it compares its parameters with. Weak references would forbid that they are swapped.
            held = [partial(_itself, weight) for weight in layer._flat_weights]
            layer._flat_weight_refs = held  # type: ignore[assignment]


def _itself(tensor: Tensor | None) -> Tensor | None:
    return tensor


def record_values(param: nn.Parameter, values: Tensor) -> None:
    """Say what the values of an empty parameter are; they are read when it is filled."""
    setattr(param, _VALUES, values)


def recorded_values(param: nn.Parameter) -> Tensor | None:
    """The values recorded for an empty parameter, if there are some."""
    values: Tensor | None = getattr(param, _VALUES, None) if param.is_meta else None
    return values


def initial_values(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """What reads the values of each empty parameter for which they are known, by its first name.

    Each gives a tensor of the parameter's shape and dtype on the CPU.
    """

    def reader(param: nn.Parameter, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values.to(param.dtype)

    known = ((name, param, recorded_values(param)) for name, param in model.named_parameters())
    return {name: reader(param, values) for name, param, values in known if values is not None}


def fill_parameters(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Give every empty parameter its known values, on `device`; parameter objects stay the same ones."""
    for name, read in initial_values(model).items():
        give_values(model.get_parameter(name), read().to(device))


def give_values(param: nn.Parameter, values: Tensor) -> None:
    """Make an empty parameter a real one; whoever holds the object sees it."""
    real = _like(param, values)
    real.__dict__.pop(_VALUES, None)
    torch.utils.swap_tensors(param, real)


def _like(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter with other values and the same attributes."""
    other = nn.Parameter(values, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    return other
