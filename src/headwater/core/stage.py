"""Stages: groups of parameters that are loaded and released together, and their places in a slab."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import torch

SLAB_ALIGNMENT_BYTES = 64
"""The alignment in bytes of each parameter in a slab: a cache line, as for a separate tensor."""

UPDATE_ELEMENTS = 64
"""A number of elements that is a multiple of the vector length of every optimizer kernel.

Kernels compute whole vectors, and the elements after the last whole vector in another way, with other bits. A
tensor with a multiple of this number of elements consists of whole vectors.
"""

ParamKey = tuple[int, int]
"""A parameter: the index of its stage, and its index in the stage."""

OptimizerState = Literal["exact", "bf16"]
"""How optimizer state is stored: with the optimizer's bits, or rounded to bf16."""

MAY_BE_MISSING = ""
"""A mark at the end of a list of a parameter's possible names in files: files may lack the parameter."""


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor if it is dense but not row-major, otherwise `None`.

    Strides of dimensions of size 1 count too: a convolution chooses its kernel by them.
    """
    strides = tuple(tensor.stride())
    if tensor.numel() < 2 or strides == torch.empty(tensor.shape, device="meta").stride():
        return None
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n > 1):
        # A gap or an overlap: the elements are not a plain permutation of a row-major tensor.
        if stride != expected:
            return None
        expected *= size
    return strides


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter tensor.

    Attributes:
        name: qualified name in the model; the first name of a shared parameter.
        shape: its shape.
        dtype: dtype of the master copy in the store.
        wire_dtype: dtype in which it is copied to the device and computed with.
        requires_grad: True if it is trained.
        aliases: further qualified names of the same tensor.
        bf16_state: fp32 optimizer state of the parameter's shape is stored in bf16, which is not exact.
        sparse_gradient: its gradients are sparse tensors, with values for some of its rows.
        strides: the strides of a dense tensor that is not row-major (transposed, channels_last);
            otherwise `None`.
        kept: the number of elements of a masked parameter for which the store has room beside the wire image;
            see [Note: masked parameters] in `store/kept.py`. `None`: all elements.
        exact_cast: its values in bf16 are rounded as torch's cast rounds them: a tie between two numbers
            becomes the even one. Otherwise the store chooses the larger one, which saves a bit per element.
        full_gradient: autograd makes its gradient in `dtype` although it computes in `wire_dtype`, as plain
            PyTorch does under autocast.
        one_cast: plain PyTorch casts it once in a forward; see [Note: one cast in an autocast block].
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    bf16_state: bool = False
    sparse_gradient: bool = False
    strides: tuple[int, ...] | None = None
    kept: int | None = None
    exact_cast: bool = False
    full_gradient: bool = False
    one_cast: bool = False

    def keeping(self, count: int) -> ParamSpec:
        """Return this parameter with `kept` set, for masks that keep at most `count` of its elements.

        The result is the same parameter if the store cannot leave out masked elements, or would save nothing.
        """
        kept = max(-(-count // UPDATE_ELEMENTS), 1) * UPDATE_ELEMENTS
        exact = self.numel % UPDATE_ELEMENTS == 0 and not self.bf16_state
        plain = self.requires_grad and self.strides is None and not self.sparse_gradient
        # Kept elements are copied one by one. With `exact_cast` each has a bit beside its bytes, and a single
        # bit cannot be copied in this way.
        plain = plain and not self.exact_cast
        return dataclasses.replace(self, kept=kept) if exact and plain and kept < self.numel else self

    @property
    def stored_numel(self) -> int:
        """The number of elements for which the store has room beside the wire image."""
        return self.numel if self.kept is None else self.kept

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which autograd makes and adds its gradients."""
        return self.dtype if self.full_gradient else self.wire_dtype

    def sum_dtype(self, wide: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which its gradients are summed.

        Args:
            wide: the dtype for a parameter that computes in fewer bits than its master has; `None` for the
                dtype of the gradients. Any other parameter has a sum in its own dtype, as in plain PyTorch.
        """
        return self.gradient_dtype if wide is None or self.wire_dtype == self.dtype else wide

    @property
    def row_numel(self) -> int:
        """The number of elements in a row of the parameter; each index in the first dimension is a row."""
        return math.prod(self.shape[1:])

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """View 1-D elements in memory order as a tensor with the parameter's shape and strides."""
        if self.strides is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of this shape 1-D; a view if it has the same strides."""
        if self.strides is None:
            return tensor.reshape(-1)
        if tensor.stride() == self.strides:
            return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())
        # A copy: the tensor has other strides than the parameter.
        flat = torch.empty(self.numel, dtype=tensor.dtype, device=tensor.device)
        self.arranged(flat).copy_(tensor)
        return flat

    def like_the_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the parameter's shape with the parameter's strides."""
        return tensor if self.strides is None else self.arranged(self.in_memory_order(tensor))

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def wire_bytes(self) -> int:
        return self.numel * self.wire_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """The parameters of one stage, in slab order.

    Attributes:
        index: position in the model's list of stages.
        name: qualified name of the module whose parameters they are.
        params: the parameters.
        part_of: index of the stage around this one; `None` for a whole block. If a block does not fit, its
            large modules are stages, and the rest of the block is the stage around them.
    """

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    part_of: int | None = None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each parameter in the slab."""
        return _offsets([param.wire_bytes for param in self.params])[0]

    @cached_property
    def slab_bytes(self) -> int:
        """The bytes of the stage's wire image and of its slab. A stage without elements has a slab too."""
        return max(_offsets([param.wire_bytes for param in self.params])[1], SLAB_ALIGNMENT_BYTES)

    @cached_property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trainable_numel(self) -> int:
        return sum(param.numel for param in self.params if param.requires_grad)

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter as a view of `slab` (uint8, at least `slab_bytes` long)."""
        return [param.arranged(flat) for param, flat in zip(self.params, self.flat_views(slab), strict=True)]

    def flat_views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the same views, 1-D in memory order."""
        return [
            slab[offset : offset + param.wire_bytes].view(param.wire_dtype)
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]


def with_params(
    stages: Sequence[StageSpec], changed: Callable[[ParamSpec], ParamSpec]
) -> tuple[StageSpec, ...]:
    """Return stages whose parameters are the results of `changed`."""
    return tuple(dataclasses.replace(stage, params=tuple(map(changed, stage.params))) for stage in stages)


def _offsets(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets, position = [], 0
    for size in sizes:
        offsets.append(position)
        position += -(-size // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES
    return tuple(offsets), position
