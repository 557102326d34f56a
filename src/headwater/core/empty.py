"""Parameters without values, on the meta device: they record where their values are, and are filled later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headwater.core.lazy import LazyTensor, StoredTensor
from headwater.core.module_parameters import named_parameters_of, parameters_of

_VALUES = "_headwater_values"
"""Attribute of an empty parameter that holds its values, usually a lazy tensor."""


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Enter a context in which modules are built with parameters on the meta device, which take no memory.

    Buffers are real: checkpoints often lack those that a constructor computes, such as rotary frequencies.
    Give the parameters their values with `load_pretrained`, then compile the model.
    """
    register = nn.Module.register_parameter
    empty_of = WeakTensorKeyDictionary()  # a parameter that is registered twice stays one object
    recurrent: list[nn.RNNBase] = []

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        # Not for subclasses: a lazy tensor takes no memory anyway.
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
            # torch compares the parameters of an RNN with these references. With torch's own weak references,
            # `swap_tensors` would fail.
            held = [partial(_itself, weight) for weight in layer._flat_weights]
            layer._flat_weight_refs = held  # type: ignore[assignment]


def _itself(tensor: Tensor | None) -> Tensor | None:
    return tensor


def record_values(param: nn.Parameter, values: Tensor) -> None:
    """Record the values of an empty parameter. They are read when it is filled."""
    setattr(param, _VALUES, values)


def recorded_values(param: nn.Parameter) -> Tensor | None:
    """Return the values recorded for an empty parameter, or `None`."""
    values: Tensor | None = getattr(param, _VALUES, None) if param.is_meta else None
    return values


def initial_values(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return, by name, a function that reads the values recorded for each empty parameter.

    The function returns a CPU tensor of the parameter's shape and dtype. A parameter with several names is
    returned under the first of them.
    """

    def reader(param: nn.Parameter, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values.to(param.dtype)

    known = ((name, param, recorded_values(param)) for name, param in named_parameters_of(model))
    return {name: reader(param, values) for name, param, values in known if values is not None}


def settle_lazy_parameters(model: nn.Module, read_now: Callable[[Tensor], bool]) -> None:
    """Turn every parameter that is a lazy tensor into an ordinary or an empty one. The objects stay the same.

    `nn.Parameter(lazy_tensor)` and `load_state_dict(…, assign=True)` make parameters that are lazy tensors.

    Args:
        model: the model.
        read_now: returns true if a parameter gets its values now. Otherwise it becomes an empty parameter
            that records where its values are.
    """
    for param in [param for param in parameters_of(model) if isinstance(param, StoredTensor)]:
        lazy = LazyTensor(param.read_pieces, param.shape, param.dtype)
        held = {*vars(lazy), "_is_param"}
        values = lazy.materialize() if read_now(param) else torch.empty_like(lazy, device="meta")
        settled = nn.Parameter(values, requires_grad=param.requires_grad)
        vars(settled).update({name: value for name, value in vars(param).items() if name not in held})
        # Swapped, because optimizers and tied modules refer to the object.
        torch.utils.swap_tensors(param, settled)
        if param.is_meta:
            record_values(param, lazy)


def fill_parameters(model: nn.Module) -> None:
    """Read the recorded values of every empty parameter into CPU memory. Parameter objects stay the same."""
    for name, read in initial_values(model).items():
        give_values(model.get_parameter(name), read().to("cpu"))


def give_values(param: nn.Parameter, values: Tensor) -> None:
    """Turn an empty parameter into a real one, in place: every reference to it sees the values."""
    real = _like(param, values)
    # The parameter must not keep the file of its values open.
    real.__dict__.pop(_VALUES, None)
    torch.utils.swap_tensors(param, real)


def _like(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a new parameter with these values and the attributes of `param`."""
    other = nn.Parameter(values, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    return other
