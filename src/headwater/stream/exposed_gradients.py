"""Gradients that a user's loop sees on an accelerator, while their values are in host memory."""

from __future__ import annotations

import weakref
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from headwater.core.operators import argument_values, written_arguments


@final
class ExposedGradient(Tensor):
    """A gradient in host memory that behaves as a tensor of the device that computes.

    In plain PyTorch `param.grad` is on the device of the parameter, so loops compute with both. Here every
    operation gets a copy on the device. Values that an operation changes are copied back to host memory.
    A view refers to the same host memory. All other results are plain tensors on the device.

    Attributes:
        host: the values, in host memory.
    """

    host: Tensor

    # Every operation reaches __torch_dispatch__, so this layer above it would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], host: Tensor, device: torch.device) -> Self:
        exposed = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        exposed.host = host
        return exposed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            device = args[0].device
            views = func(*tree_map_only(cls, _host, args), **kwargs)
            return tree_map_only(Tensor, lambda view: cls(view, device), views)
        copies: dict[int, tuple[Self, Tensor]] = {}

        def on_device(exposed: Self) -> Tensor:
            if id(exposed) not in copies:
                copies[id(exposed)] = exposed, _copy(exposed.host, exposed.device)
            return copies[id(exposed)][1]

        device_args, device_kwargs = tree_map_only(cls, on_device, (args, kwargs))
        results = func(*device_args, **device_kwargs)
        for written in _written(func, args, kwargs):
            exposed, values = copies[id(written)]
            exposed.host.copy_(values)
        same = {id(values): exposed for exposed, values in copies.values()}
        return tree_map_only(Tensor, lambda result: same.get(id(result), result), results)

    # Methods that read the values without an operation of torch:

    def tolist(self) -> Any:
        return self.host.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = _copy(self.host, self.device)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy(self.host, self.device).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gradient in host memory, exposed on {self.device}: {self.host!r}"


def exposed_on(device: torch.device, host: Tensor) -> Tensor:
    """Return a gradient in host memory as a tensor of `device`.

    Later calls return the same object as long as it is referenced.

    Args:
        device: the device of the parameter.
        host: the gradient. Returned itself if `device` is the host, or if it is sparse.
    """
    if device == host.device or host.layout is not torch.strided:
        return host
    reference: weakref.ref[ExposedGradient] | None = getattr(host, "exposed", None)
    exposed = None if reference is None else reference()
    if exposed is None:
        exposed = ExposedGradient(host, device)
        # The reference is weak, to avoid a cycle: `exposed` has a reference to `host`.
        host.exposed = weakref.ref(exposed)  # type: ignore[attr-defined]
    return exposed


def _host(exposed: ExposedGradient) -> Tensor:
    return exposed.host


def _copy(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, copy=True)


def _is_view(func: Any) -> bool:
    """True if an operator returns views of its first argument and changes nothing."""
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ExposedGradient]:
    """Return the gradients that an operator changes in place."""
    found: list[ExposedGradient] = []
    tree_map_only(ExposedGradient, found.append, argument_values(written_arguments(func), func, args, kwargs))
    return found
