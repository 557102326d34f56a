"""Tensors of a dry run: fake tensors, which take no memory, or the model's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from headwater.core.effects import attributes_of_parameter
from headwater.core.lazy import StoredTensor
from headwater.core.module_parameters import named_parameters_of, parameters_of
from headwater.core.stage import ParamSpec
from headwater.core.trees import map_tensors, tensors_in
from headwater.plan.alive import memory_key
from headwater.plan.known_results import call_known
from headwater.plan.partition import Partition
from headwater.plan.stand_ins import Operators, python_stand_ins
from headwater.plan.triton_kernels import without_triton_kernels
from headwater.plan.writes import changed_by

T = TypeVar("T")

_EMPTY: Any = torch.ops.aten.empty.memory_format
_EMPTY_STRIDED: Any = torch.ops.aten.empty_strided.default

State = dict[str, torch.Tensor]
"""Name -> parameter (in wire precision) or buffer of a model. A shared tensor has several names."""


class Tensors(Protocol):
    """Makes the stand-ins for the tensors of model and batch in one dry run, and runs operators on them."""

    def active(self) -> Any:
        """Return the context in which the dry run must take place."""

    def state(self, model: nn.Module, partition: Partition) -> State:
        """Return the tensors that replace the parameters and buffers of a model."""

    def batch(self, batch: Any) -> Any:
        """Return the batch that the dry run uses: `batch` with its tensors replaced."""

    def module_call(self) -> AbstractContextManager[None]:
        """Return the context in which a module of the model must be called."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator on tensors of the dry run; return its result."""


@contextmanager
def _without_logged_failures() -> Iterator[None]:
    """Inside the context, torch does not log the traceback of an operator that fails on fake tensors.

    The error reaches the user anyway, for example if a batch does not have the shape that the model expects.
    """
    logger = logging.getLogger(FakeTensorMode.__module__)

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


class FakeTensors:
    """Tensors without values, except the known values of batch and buffers, and results from these alone.

    The known values are those of integers, truth values, and single numbers of any dtype, such as a buffer
    `initialized`.
    """

    def __init__(self) -> None:
        self._operators = Operators()
        self.call = self._operators.call
        self.module_call = self._operators.module_call

    @contextmanager
    def active(self) -> Iterator[None]:
        # Operators such as `randperm` draw real numbers, so the generator is forked. This is outside of the
        # fake mode, because the state of a generator is a real tensor.
        with (
            torch.random.fork_rng(devices=[]),
            FakeTensorMode(allow_non_fake_inputs=True),
            python_stand_ins(),
            without_triton_kernels(),
            _without_logged_failures(),
        ):
            yield

    def state(self, model: nn.Module, partition: Partition) -> State:
        return _state(model, partition, _fake_param, self._fake)

    def batch(self, batch: Any) -> Any:
        return map_tensors(self._fake, batch)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = _empty_like(tensor)
        with _disable_current_modes():  # the copy must have values
            is_known = tensor.numel() == 1 or not tensor.is_floating_point()
            value = _in_host_memory(tensor) if is_known and not tensor.is_meta else tensor
        self._operators.know(fake, value)
        return fake


class _WritesToModel(Exception):
    """Raised when a forward is about to change the model's own weights, before they are changed."""


class RealTensors:
    """Tensors with the model's values in host memory, for forwards in which weights decide what runs.

    Parameters share memory with the model's, but have separate gradients. A forward that changes a parameter
    which is not a copy gets an exception.

    Attributes:
        written: the parameters that must be copies, because the forward changes them.

    Args:
        copied: names of the parameters that are copies.
    """

    def __init__(self, copied: Set[str] = frozenset()) -> None:
        self.written: set[str] = set()
        self._copied = copied
        self._shared: dict[object, str] = {}
        self._alive: list[torch.Tensor] = []  # kept, so that no new tensor gets a key in `_shared`

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            yield

    def state(self, model: nn.Module, partition: Partition) -> State:
        params = dict(named_parameters_of(model))

        def own(spec: ParamSpec) -> torch.Tensor:
            value = params[spec.name].detach().to("cpu", spec.wire_dtype)
            if spec.name in self._copied:
                value = value.clone()
            else:
                self._shared[memory_key(value)] = spec.name
            return _trained(_of_class(params[spec.name], value), spec)

        return _state(model, partition, own, _host_copy)

    def batch(self, batch: Any) -> Any:
        return map_tensors(_host_copy, batch)

    def module_call(self) -> AbstractContextManager[None]:
        return nullcontext()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = (self._shared.get(memory_key(tensor)) for tensor in changed_by(func, args, kwargs))
        changed = {name for name in names if name is not None}
        if changed:
            self.written |= changed
            raise _WritesToModel
        out = func(*args, **kwargs)
        if isinstance(out, StoredTensor):  # `detach` of a stored tensor has no memory in common with it
            name = self._shared.get(memory_key(args[0]))
            if name is not None:
                self._shared[memory_key(out)] = name
                self._alive.append(out)
        return out


def with_real_tensors(run: Callable[[RealTensors], T]) -> T:
    """Return the result of a dry run on the model's own tensors. It writes only to copies of parameters."""
    copied: set[str] = set()
    while True:
        tensors = RealTensors(copied)
        try:
            result = run(tensors)
        except Exception:  # the user's forward may turn `_WritesToModel` into any other error
            # An error without a write is the user's, and is raised again.
            if not tensors.written:
                raise
        else:
            if not tensors.written:  # a forward may catch the exception
                return result
        copied = copied | tensors.written


def have_values(model: nn.Module, batch: Any) -> bool:
    """True if every tensor of a model and a batch has values, in host memory or on a device."""
    tensors = [*parameters_of(model), *model.buffers(), *tensors_in(batch)]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def fake_state(model: nn.Module, partition: Partition) -> State:
    """Return fake parameters and buffers without known values. Needs a fake mode."""
    return _state(model, partition, _fake_param, _empty_like)


def _fake_param(spec: ParamSpec) -> torch.Tensor:
    return _trained(_empty(spec.wire_dtype, spec.shape, spec.strides), spec)


def _trained(param: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Return a new tensor that requires gradients as the parameter does, and in the same dtype."""
    if spec.full_gradient:
        param.grad_dtype = spec.gradient_dtype
    return param.requires_grad_(spec.requires_grad)


def _of_class(param: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return a value with the class of a parameter, whose methods a forward may call."""
    kind = param.home.kind if hasattr(param, "home") else type(param)
    is_own = kind is not torch.nn.Parameter and torch.nn.Parameter in kind.__mro__
    return value.as_subclass(kind) if is_own else value


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return _empty(tensor.dtype, tensor.shape, tensor.stride())


def _empty(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return a fake tensor; it is contiguous if no strides are given. Needs a fake mode."""
    options = {"dtype": dtype, "device": torch.device("cpu")}
    made: torch.Tensor
    if strides is None:
        made = call_known(_EMPTY, (tuple(shape),), options)
    else:
        made = call_known(_EMPTY_STRIDED, (tuple(shape), tuple(strides)), options)
    return made


def _state(
    model: nn.Module,
    partition: Partition,
    make_param: Callable[[ParamSpec], torch.Tensor],
    make_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> State:
    state: State = {}
    originals = dict(named_parameters_of(model, remove_duplicate=False))
    for stage in partition.stages:
        for spec in stage.params:
            param = make_param(spec)
            # The forward may read attributes of a parameter, such as the widths that mup keeps there.
            if attributes := attributes_of_parameter(vars(originals[spec.name])):
                vars(param).update(map_tensors(make_buffer, attributes))
            state |= dict.fromkeys((spec.name, *spec.aliases), param)
    buffers: dict[int, torch.Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in buffers:
            buffers[id(buffer)] = make_buffer(buffer)
        state[name] = buffers[id(buffer)]
    return state
