"""The layout of a stage's bytes: its wire image, and its rest (parts of masters and optimizer state)."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch

from headwater.core.buffers import PAGE_BYTES, round_down, round_up
from headwater.core.stage import SLAB_ALIGNMENT_BYTES, ParamSpec, StageSpec

PIECE_ELEMENTS = 1 << 20
"""Maximum number of elements of a piece in host memory or on disk. Such a piece fits into the CPU's cache."""

DEVICE_PIECE_ELEMENTS = 1 << 25
"""Maximum number of elements of a piece in device memory. With smaller pieces, the start of a kernel would
take longer than its work.

An H200 updates such a piece in about 0.7 ms. To start its kernels takes about as long, because the updates of
other stages keep the cores and the memory of the host busy.
"""
MOST_UNFINISHED = 1
"""Maximum number of stages whose updates wait or run on a thread while the backward of a step continues."""

MOST_AHEAD = 2
"""With updates in backward, the most uses of stages by which one rank's backward is ahead of the others."""

GROUP_BYTES = 16 << 20
"""Minimum size of a group. A disk reads and writes blocks of this size at full speed."""

RETURNED_BYTES = 64 << 20
"""While a store is filled, memory of freed weights returns to the system whenever it has this size."""

STAGING_BUFFERS = 4
"""Buffers of a disk tier, each for a group: enough for two threads that read at full speed."""


def tie_bytes(numel: int) -> int:
    """Return the number of bytes that hold the bits of `Encoding.EVEN` for elements of one piece."""
    return -(-numel // 8)


class Encoding(enum.Enum):
    """The ways to store the master of a parameter: in the wire image, beside it, or one half in each."""

    SAME = "same"  # the wire image is the master
    SPLIT = "split"  # bf16 on the wire is the upper half of the master; the lower half is in the rest
    EVEN = "even"  # the same with ties rounded to even, so that one bit more of each element is in the rest
    COPY = "copy"  # the master is in the rest, the wire image is rounded from it


def encoding_of(param: ParamSpec) -> Encoding:
    """Return how the master of a parameter is stored."""
    if param.wire_dtype == param.dtype:
        return Encoding.SAME
    if (param.wire_dtype, param.dtype) == (torch.bfloat16, torch.float32):
        return Encoding.EVEN if param.exact_cast else Encoding.SPLIT
    return Encoding.COPY


MASTER_FIELD = {Encoding.SPLIT: "master.low", Encoding.EVEN: "master.low", Encoding.COPY: "master"}
"""The field that holds the rest of the master, by encoding."""

TIES_FIELD = "master.ties"
"""The field with a bit for each element in `Encoding.EVEN`, packed in bytes, the lowest bit first."""

MASTER_FIELDS = frozenset((*MASTER_FIELD.values(), TIES_FIELD))
"""All fields of masters. Other fields are optimizer state."""


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """Dtype and shape of one optimizer state tensor. `shape` is `None` if it is the parameter's shape."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None

    def shape_for(self, param: ParamSpec) -> tuple[int, ...]:
        """Return the shape of the tensor for a parameter."""
        return param.shape if self.shape is None else self.shape


def arranged_state(param: ParamSpec, state: torch.Tensor) -> torch.Tensor:
    """Return a state tensor with the strides of its parameter, if it has the parameter's shape."""
    return param.arranged(state.view(-1)) if state.shape == param.shape else state


StateLayout = Mapping[str, StateTensor]
"""Name -> optimizer state tensor of one parameter, without scalars, as the optimizer has it.

The store may keep it in another dtype: see `stored_dtype`.
"""


def stored_dtype(param: ParamSpec, state: StateTensor) -> torch.dtype:
    """Return the dtype in which the store keeps an optimizer state tensor of `param`."""
    narrow = param.bf16_state and state.dtype == torch.float32 and state.shape is None
    return torch.bfloat16 if narrow else state.dtype


Scalars = dict[str, Any]
"""Name -> scalar of a parameter's optimizer state, such as the step count. Scalars stay in host memory."""


@dataclasses.dataclass(frozen=True)
class Field:
    """The place of a tensor in the bytes of a group. `offset` counts bytes from the start of the group."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def span(self) -> slice:
        """Its bytes in the group."""
        return slice(self.offset, self.offset + math.prod(self.shape) * self.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of elements of one parameter that is updated in one go.

    Attributes:
        param: index of the parameter in its stage.
        start: first element.
        stop: one past the last element.
        encoding: how its master is stored.
        fields: its tensors beside the wire image.
        is_compact: true if it is a range of the kept elements of a masked parameter, in their order; see
            [Note: masked parameters] in `store/kept.py`.
    """

    param: int
    start: int
    stop: int
    encoding: Encoding
    fields: tuple[Field, ...]
    is_compact: bool = False

    def views(self, rest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of the piece by name, as views of the group's bytes."""
        return {field.name: rest[field.span].view(field.dtype).view(field.shape) for field in self.fields}

    def moved(self, num_bytes: int) -> Piece:
        """Return the piece in a group that begins `num_bytes` earlier."""
        fields = (dataclasses.replace(field, offset=field.offset + num_bytes) for field in self.fields)
        return dataclasses.replace(self, fields=tuple(fields))


@dataclasses.dataclass(frozen=True)
class Group:
    """Pieces whose bytes beside the wire image lie together. A tier reads and writes them in one go.

    Attributes:
        pieces: the pieces, in order.
        offset: bytes from the start of the stage's rest; a multiple of the page size.
        num_bytes: bytes of the group, a multiple of the page size.
    """

    pieces: tuple[Piece, ...]
    offset: int
    num_bytes: int

    def pages_of(self, fields: Collection[str]) -> list[slice]:
        """Return the bytes of whole pages that hold these fields of the pieces, in order."""
        return _whole_pages(self._spans(fields))

    def outer_pages_of(self, fields: Collection[str]) -> list[slice]:
        """Return the bytes of the pages of `pages_of` that also hold other bytes, in order."""
        return _whole_pages([page for span in self._spans(fields) for page in outer_pages(span)])

    def _spans(self, fields: Collection[str]) -> list[slice]:
        return [field.span for piece in self.pieces for field in piece.fields if field.name in fields]


def _whole_pages(spans: Iterable[slice]) -> list[slice]:
    """Return the whole pages that hold spans, which are in order; neighbours are joined."""
    pages: list[slice] = []
    for span in spans:
        if span.start >= span.stop:  # a parameter without elements: its empty span may begin inside a page
            continue
        start = round_down(span.start)
        if pages and start <= pages[-1].stop:
            start = pages.pop().start
        pages.append(slice(start, round_up(span.stop)))
    return pages


def outer_pages(span: slice) -> list[slice]:
    """Return the first and the last page of a span of bytes, each only if the span has a part of it."""
    if span.start >= span.stop:
        return []
    starts = dict.fromkeys(round_down(end) for end in (span.start, span.stop) if end % PAGE_BYTES)
    return [slice(start, start + PAGE_BYTES) for start in starts]


class StageLayout:
    """Sizes and offsets of a stage's bytes: the wire image, and groups of masters and optimizer state.

    Args:
        stage: the stage.
        states: optimizer state of each of its parameters; empty for frozen ones.
        elementwise: true if the optimizer may update a parameter piece by piece.
        piece_elements: largest number of elements in a piece of a parameter that can be cut.
    """

    def __init__(
        self,
        stage: StageSpec,
        states: list[StateLayout],
        *,
        elementwise: bool,
        piece_elements: int = PIECE_ELEMENTS,
    ) -> None:
        self.stage = stage
        self.piece_elements = piece_elements
        self.wire_bytes = round_up(stage.slab_bytes)
        most = piece_elements if elementwise else None
        self.groups = _pack([
            _Extent(
                index,
                start,
                stop,
                encoding_of(param),
                _field_shapes(param, states[index], start, stop),
                is_compact=param.kept is not None,
            )
            for index, param in enumerate(stage.params)
            for start, stop in _split(param, most if param.strides is None else None)
        ])  # fmt: skip

    @cached_property
    def whole(self) -> Group:
        """All pieces in one group, for updates where all bytes are in memory: they need fewer calls."""
        pieces = (piece.moved(group.offset) for group in self.groups for piece in group.pieces)
        return Group(tuple(pieces), 0, self.rest_bytes)

    @cached_property
    def rest_bytes(self) -> int:
        """The bytes of all groups together."""
        return self.groups[-1].offset + self.groups[-1].num_bytes if self.groups else 0


def _split(param: ParamSpec, most: int | None) -> list[tuple[int, int]]:
    """Return the range of each piece of a parameter. With sparse gradients, a piece has whole rows.

    If the parameter is masked, these are ranges of its kept elements.

    Args:
        param: the parameter.
        most: largest number of elements of a piece; `None` if the parameter cannot be cut.
    """
    numel = param.stored_numel
    step = max(numel, 1) if most is None else most
    if param.sparse_gradient and numel:
        step = max(step // param.row_numel, 1) * param.row_numel
    return [(start, min(start + step, numel)) for start in range(0, max(numel, 1), step)]


def _field_shapes(
    param: ParamSpec, states: StateLayout, start: int, stop: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    whole = param.kept is None and (start, stop) == (0, param.numel)
    own_shape = param.shape if whole else (stop - start,)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    match encoding := encoding_of(param):
        case Encoding.SPLIT | Encoding.EVEN:
            shapes[MASTER_FIELD[encoding]] = (torch.int16, own_shape)
        case Encoding.COPY:
            shapes[MASTER_FIELD[encoding]] = (param.dtype, own_shape)
    if encoding is Encoding.EVEN:
        shapes[TIES_FIELD] = (torch.uint8, (tie_bytes(stop - start),))
    for name, state in states.items():
        shapes[name] = (stored_dtype(param, state), own_shape if state.shape is None else state.shape)
    return shapes


@dataclasses.dataclass(frozen=True)
class _Extent:
    """A piece before it has an offset in a group."""

    param: int
    start: int
    stop: int
    encoding: Encoding
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    is_compact: bool

    def place(self, offset: int) -> tuple[Piece, int]:
        """Place the piece's tensors one after another from `offset` on. Return the piece and the end."""
        fields = []
        for name, (dtype, shape) in self.shapes.items():
            fields.append(Field(name, dtype, shape, offset))
            # Aligned, so that a field can be viewed in its dtype.
            offset += round_up(math.prod(shape) * dtype.itemsize, SLAB_ALIGNMENT_BYTES)
        piece = Piece(
            self.param, self.start, self.stop, self.encoding, tuple(fields), is_compact=self.is_compact
        )
        return piece, offset


def _pack(extents: list[_Extent]) -> tuple[Group, ...]:
    """Pack pieces, in order, into groups of at least `GROUP_BYTES`; the last group may be smaller."""
    groups: list[Group] = []
    pieces: list[Piece] = []
    used = start = 0
    for position, extent in enumerate(extents):
        piece, used = extent.place(used)
        pieces.append(piece)
        # A piece is never divided between groups: it is updated as one.
        if used >= GROUP_BYTES or position == len(extents) - 1:
            groups.append(Group(tuple(pieces), start, round_up(used, PAGE_BYTES)))
            start += groups[-1].num_bytes
            pieces, used = [], 0
    return tuple(groups)
