"""Serialization of a call of a block for another process. Most tensors are sent without their values."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from headwater.core.loss_function import LossFunction
from headwater.core.module_calls import surround
from headwater.core.module_parameters import named_parameters_of
from headwater.core.precision import Precision
from headwater.plan.trace import trace_step

_WEIGHT_STD = 0.02
"""Standard deviation of made-up weights, as most models initialize them."""
_KEPT_BYTES = 1 << 20
"""Integer tensors up to this size are sent with their values, because these may be indices."""


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A block, and the arguments of one of its calls. Tensors may have no values.

    Attributes:
        block: the module.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_calls(
    model: nn.Module,
    example: Any,
    precision: Precision,
    loss: LossFunction,
    names: list[str],
    device: str = "cpu",
) -> dict[str, BlockCall]:
    """Return the first call of each of some blocks in a dry run. A block that is not called is left out.

    Args:
        model: the model.
        example: a micro-batch; its values are not used.
        precision: precision of the run.
        loss: computes the loss.
        names: names of the blocks in the model.
        device: `cpu` or `cuda`, whose autocast decides the dtypes of inputs.
    """
    found: dict[str, BlockCall] = {}

    def recording(name: str, block: nn.Module) -> Any:
        def layer(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.setdefault(name, BlockCall(block, args, kwargs))
            return call(*args, **kwargs)

        return surround(block, layer)

    def recorded_loss(model: nn.Module, batch: Any) -> Any:
        # These layers are added here, inside those of the dry run, which see fake weights.
        removes = [recording(name, blocks[name]) for name in names]
        try:
            return loss(model, batch)
        finally:
            for remove in removes:
                remove()

    blocks = {name: model.get_submodule(name) for name in names}
    trace_step(model, example, precision, loss_function=recorded_loss, device=device)
    return found


def pack(call: BlockCall, dtypes: Mapping[str, torch.dtype]) -> bytes:
    """Return a call as bytes. Only small tensors of integers are sent with their values.

    Args:
        call: the call.
        dtypes: dtype with which each parameter of the block computes, by its name in the block.

    Raises:
        PicklingError, TypeError, AttributeError: if an object in the block or its inputs cannot be pickled.
    """
    packed = io.BytesIO()
    _Packer(packed, {id(p): dtypes.get(n, p.dtype) for n, p in named_parameters_of(call.block)}).dump(
        (call.block, call.args, call.kwargs)
    )
    return packed.getvalue()


def unpack(packed: BinaryIO, device: str) -> BlockCall:
    """Return a call that `pack` made, with random values, on a device."""
    return BlockCall(*_Unpacker(packed, device).load())


class _Packer(pickle.Pickler):
    """A pickler that replaces tensors by descriptions."""

    def __init__(self, file: io.BytesIO, dtypes: Mapping[int, torch.dtype]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._dtypes = dtypes
        self._described: list[torch.Tensor] = []  # alive, so that no other tensor gets the same `id`

    def persistent_id(self, value: object) -> object:
        """Return the description of a tensor; `None` for other objects, which are pickled."""
        if not isinstance(value, torch.Tensor) or (value.layout == torch.strided and _has_indices(value)):
            return None
        self._described.append(value)
        dtype = self._dtypes.get(id(value), value.dtype)
        is_param = isinstance(value, nn.Parameter)
        return id(value), tuple(value.shape), tuple(value.stride()), dtype, value.requires_grad, is_param


def _has_indices(value: torch.Tensor) -> bool:
    """True if a tensor has values that may be indices, and is small."""
    known = not (value.is_meta or isinstance(value, FakeTensor) or value.is_floating_point())
    return known and value.numel() * value.element_size() <= _KEPT_BYTES


class _Unpacker(pickle.Unpickler):
    """An unpickler that makes tensors from descriptions."""

    def __init__(self, file: BinaryIO, device: str) -> None:
        super().__init__(file)
        self._device = device
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, described: Any) -> torch.Tensor:
        """Return the tensor of a description; the same one each time it is described."""
        key, shape, stride, dtype, requires_grad, is_param = described
        if key not in self._made:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
            if dtype.is_floating_point:
                tensor.normal_(std=_WEIGHT_STD if is_param else 1.0)
            else:
                tensor.fill_(dtype == torch.bool)  # a mask that hides nothing, or index 0
            self._made[key] = (
                nn.Parameter(tensor, requires_grad) if is_param else tensor.requires_grad_(requires_grad)
            )
        return self._made[key]
