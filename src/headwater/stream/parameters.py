"""Parameters at rest: the class of a parameter between forwards; see [Note: parameters at rest]."""

from __future__ import annotations

import functools
import sys
import types
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.core.lazy import StoredTensor
from headwater.core.tensor_values import OF_DTYPE
from headwater.core.uncompiled import uncompiled
from headwater.stream.assigned_sources import note_source
from headwater.stream.at_rest import (
    LIKE_ANOTHER,
    AtRest,
    RecordedPart,
    all_of,
    changed_while_recording,
    moved,
    on_values,
    plain_value,
    refuse_without_values,
    view_like_itself,
)
from headwater.stream.autocast_blocks import add_gradients_in
from headwater.stream.consumed_gradients import ConsumedGradient
from headwater.stream.detached import DetachedAtRest, home_of, whole_memory
from headwater.stream.exposed_gradients import exposed_on
from headwater.stream.leaving import HOST
from headwater.stream.left_gradients import GRAD, collect_left, give_to_frozen, take_accumulated
from headwater.stream.new_parameters import becomes_parameter, becomes_parameter_when_marked, new_parameter
from headwater.stream.parameter_memory import Memory, leave_memory, present_memory, return_to_memory
from headwater.stream.placeholders import BY_IDENTITY, DATA, LAYOUT, NotTraced, is_metadata

_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code that runs hooks around the step of every optimizer of torch."""


def running_steps() -> list[object]:
    """Return the optimizer of each step that the caller runs in, the innermost first."""
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP:
            found.append(frame.f_locals["args"][0])
        frame = frame.f_back
    return found


def _is_optimizer_running() -> bool:
    """True if the caller is called by the step of an optimizer."""
    return bool(running_steps())


class ParameterAtRest(AtRest, NotTraced, nn.Parameter):
    """A parameter whose values are in the weight store. Existing parameters get this class by assignment."""

    selection = staticmethod(all_of)
    _is_param = becomes_parameter_when_marked

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not call `__init_subclass__` of the user's class, for which `class_at_rest` makes a subclass."""

    @property
    def source(self) -> Memory:
        return Memory.of(self)

    @property
    def owner(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @property
    @uncompiled
    def grad(self) -> torch.Tensor | None:
        """The gradient in the store, as a tensor on the parameter's device. Changes in place reach the store.

        After a step has consumed the gradient, it is a `ConsumedGradient`, which has no values, until it is
        dropped.
        """
        collect_left(self)
        param: Any = self
        if not isinstance(param, ParameterAtRest):  # it has become a plain parameter
            found: torch.Tensor | None = GRAD.__get__(self)
            return found
        status, is_consumed = self.home.store.gradients.status, self.home.gradient_is_consumed
        is_used = is_consumed or self.home.key not in status.present
        if status.is_stepping and is_used and _is_optimizer_running():
            return None  # without a call of the store, which could raise Ctrl-C in the middle of the step
        if not is_consumed:
            gradient = self.home.gradient()
            return None if gradient is None else exposed_on(self.home.device, gradient)
        status.is_stepping = False  # if it is true, Ctrl-C has ended the step
        return ConsumedGradient.of(self)

    @grad.setter
    @uncompiled
    def grad(self, value: torch.Tensor | None) -> None:
        take_accumulated(self)  # left by Ctrl-C
        if value is not None:
            _refuse_other_kind(self, value)
            if not self.home.spec.requires_grad:
                give_to_frozen(self, value)
                return
        self.home.set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # The placeholder has the dtype of the wire image; plain PyTorch would show that of the master.
            if func in LAYOUT or func in OF_DTYPE:
                return func(args[0].home.meta, *args[1:], **kwargs)
            if func is torch.autograd.grad:
                return _in_dtypes_of_masters(func(*args, **kwargs), args[1])
            if func is torch.Tensor.register_hook and args[0].home.spec.one_cast:
                add_gradients_in(args[0].home.spec.gradient_dtype, args[0])  # the hook must not see 16 bits
            if is_metadata(func) or func in BY_IDENTITY:
                return func(*args, **kwargs)
            if func in LIKE_ANOTHER and args[0] is args[-1]:
                return view_like_itself(func, args[0])
            if func is torch.Tensor.detach and becomes_parameter():
                return new_parameter(args[0], args[0])
            if func is torch.Tensor.detach:
                return DetachedAtRest.of(args[0])
            refuse_without_values(args)  # before the two operations that write a value as it is
            if func == DATA.__set__:
                return assign_data(args[0], args[1])
            if func is torch.Tensor.copy_ and _is_replaced(args[0], args[1]):
                # Before the write, because a Ctrl-C that came meanwhile is raised at the end of the write.
                torch.autograd.graph.increment_version(args[0])
                args[0].home.write(args[1])
                return args[0]
            return on_values(func, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Self:
        """Assign the values of a tensor, as `torch.nn.utils.parametrize` does."""
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            raise moved(self.home, "set_")
        if torch.is_grad_enabled() and self.requires_grad:
            raise changed_while_recording(self.home)
        with torch._C.DisableTorchFunctionSubclass():
            assign_data(self, args[0])
            torch.autograd.graph.increment_version(self)
        return self

    def _use_count(self) -> int:
        """Raise `StreamError`. Only `torch.utils.swap_tensors` calls this, before it swaps anything."""
        raise moved(self.home, "torch.utils.swap_tensors")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.home.spec
        return f"Parameter in the weight store: {spec.name}, shape {list(spec.shape)}, {spec.dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self.home.plain_copy(requires_grad=self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __copy__(self) -> nn.Parameter:
        """Raise `StreamError`. In plain PyTorch the copy shares the memory of the parameter."""
        raise StreamError(
            "copy.copy would make a parameter that shares the memory of a streamed one",
            where=self.home.spec.name,
            remedy="copy the values too: copy.deepcopy(parameter), which is a plain parameter",
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StreamError(
            "a module whose weights are streamed cannot be pickled",
            where=self.home.spec.name,
            remedy="save its state_dict(), or pickle copy.deepcopy(module), which is a plain module",
        )


@functools.cache
def class_at_rest(kind: type[nn.Parameter]) -> type[ParameterAtRest]:
    """Return the class that a parameter has at rest. It has the methods of the user's class `kind` too.

    Args:
        kind: the class of the parameter while it is bound.
    """
    # `nn.Parameter` of a tensor of another class has this class, which is not derived from `nn.Parameter`.
    if kind is nn.Parameter or nn.Parameter not in kind.__mro__:
        return ParameterAtRest
    made: type[ParameterAtRest] = types.new_class(
        f"{kind.__name__}AtRest",
        (ParameterAtRest, kind),
        exec_body=lambda space: space.update(__module__=__name__),
    )
    return made


def _refuse_other_kind(param: ParameterAtRest, gradient: Any) -> None:
    """Raise torch's error if a parameter cannot have a gradient of this type, shape or dtype."""
    spec = param.home.spec
    if (
        not isinstance(gradient, torch.Tensor)
        or tuple(gradient.shape) != spec.shape
        or gradient.dtype not in (spec.dtype, spec.gradient_dtype)
        or gradient.is_meta
    ):
        GRAD.__set__(torch.empty(spec.shape, dtype=spec.dtype, device=param.device), gradient)


def _in_dtypes_of_masters(gradients: Any, inputs: Any) -> tuple[torch.Tensor | None, ...]:
    """Return results of `torch.autograd.grad` in the dtypes that they have in plain PyTorch.

    Those of weights that autocast casts may be in 16 bits; see [Note: one cast in an autocast block].
    """
    return tuple(
        gradient.to(given.home.spec.gradient_dtype)
        if gradient is not None and isinstance(given, ParameterAtRest) and given.home.spec.one_cast
        else gradient
        for gradient, given in zip(gradients, inputs, strict=True)
    )


@uninterrupted
def assign_data(param: ParameterAtRest, value: torch.Tensor) -> None:
    """Assign `param.data = value`.

    A value of another shape, dtype or stride order turns the parameter into a plain one.

    Raises:
        StreamError: if the assignment would tie two parameters.
    """
    home, source, whole = param.home, home_of(value), whole_memory(value, param)
    if value is param or (whole is not None and whole is present_memory(param)):
        return
    given = value
    if source is not None and source != home:
        raise _tied_by_data(home.spec.name, source.spec.name)
    if source is not None and isinstance(value, AtRest):
        value = value.selection(home.read()).clone()
    elif source is not None and isinstance(value, StoredTensor):
        # `materialize` reads piece by piece, so that all values are in memory only once.
        value = value.materialize()
    leave_memory(param)
    value = plain_value(value)
    if not home.fits(value):
        # This comes before the assignment, because it copies the store's values to the parameter.
        home.leave(HOST if value.is_meta else value.device)
        DATA.__set__(param, value)
        return
    home.write(value)
    note_source(param, given)
    # `.data =` does not change torch's version counter. Here it must change, so that a backward that saved
    # the old values raises an error instead of using the new ones.
    torch.autograd.graph.increment_version(param)
    if whole is not None:
        return_to_memory(whole)


def _tied_by_data(name: str, other: str) -> StreamError:
    """Return the error for an assignment after which two streamed parameters would share memory."""
    return StreamError(
        "two parameters would share memory, but a streamed parameter needs separate memory",
        where=f"{name}.data = {other}.data",
        remedy=f"make them one Parameter, model.{name} = model.{other}, or assign a copy, "
        f"model.{name}.data = model.{other}.data.clone()",
    )


def _is_replaced(param: object, value: torch.Tensor) -> bool:
    """True if `param.copy_(value)` is allowed and needs no old values of the parameter."""
    if not isinstance(param, ParameterAtRest) or param.shape != value.shape:
        return False
    if isinstance(value, AtRest | RecordedPart):
        return False
    return not (torch.is_grad_enabled() and param.requires_grad)
