"""The kept elements of masked parameters: their places, and the copies that an update works on.

[Note: masked parameters] A masked element is zero, and so is its optimizer state. If `ParamSpec.kept` is set,
the store has the rest of the master and the optimizer state only for the elements that the mask keeps. The
wire image stays dense, because the code of modules reads dense weights.

A piece of such a parameter (`Piece.is_compact`) is a range in the order of its kept elements, and its fields
have these elements one after another. An update copies their wire values and gradients together, runs the
same kernels on these copies, and copies the new wire values back. Everything else sees runs of the dense
parameter, with zeros for masked elements: `Pieces` expands and compresses them.

Kernels compute the last elements of a tensor in another way, with other bits. So the number of elements of
the parameter and of each piece is a multiple of `UPDATE_ELEMENTS`, and the copies have zeros at their end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from headwater.core.buffers import round_up
from headwater.core.stage import UPDATE_ELEMENTS, ParamKey, ParamSpec
from headwater.sparsity.masks import PackedMask
from headwater.store.sparse import rows_of

if TYPE_CHECKING:
    from headwater.store.layout import Piece

FirstMask = Callable[[str, Callable[[], torch.Tensor]], PackedMask]
"""Returns the first mask of a parameter, from its name and a function that returns its values."""

_BLOCK = 1 << 16
"""Elements of a block, whose kept elements are counted once and listed together. A multiple of 8."""


@final
class KeptElements:
    """The places of the kept elements of a parameter.

    Attributes:
        mask: the mask.
        count: number of kept elements.

    Args:
        mask: the mask.
    """

    def __init__(self, mask: PackedMask) -> None:
        self.mask = mask
        self._numel = math.prod(mask.shape)
        self._before = np.cumsum([0, *mask.counts(_BLOCK)])  # kept elements before each block
        self.count = int(self._before[-1])

    def places(self, start: int, stop: int) -> torch.Tensor:
        """Return the indices of the kept elements of a range, int64, counted from `start`."""
        found = [
            np.flatnonzero(self._flags(at, min(at + _BLOCK, stop))) + (at - start)
            for at in range(start, stop, _BLOCK)
        ]
        return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, dtype=np.int64))

    def also_in(self, other: KeptElements, size: int) -> torch.Tensor:
        """Return a bool for each kept element, in order: true if `other` keeps it too. Padded to `size`."""
        found, number = np.zeros(size, dtype=np.bool_), 0
        for at in range(0, self._numel, _BLOCK):
            stop = min(at + _BLOCK, self._numel)
            both = other._flags(at, stop)[self._flags(at, stop)]
            found[number : number + len(both)] = both
            number += len(both)
        return torch.from_numpy(found)

    def _flags(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        skipped, bits = start % 8, self.mask.bits[start // 8 : -(-stop // 8)].numpy()
        return np.unpackbits(bits, count=skipped + stop - start)[skipped:].view(np.bool_)

    def element(self, number: int) -> int:
        """Return the index of kept element `number`, counted from 0; with fewer, the parameter's size."""
        if number >= self.count:
            return self._numel
        block = int(np.searchsorted(self._before, number, side="right")) - 1
        start = block * _BLOCK
        places = self.places(start, min(start + _BLOCK, self._numel))
        return start + int(places[number - int(self._before[block])])

    def range_of(self, piece: Piece) -> tuple[int, int]:
        """Return the dense range of elements of a piece. The ranges of all pieces cover the parameter."""
        return self.element(piece.start) if piece.start else 0, self.element(piece.stop)


@final
class CommonValues:
    """The values of the elements that both the old and the new mask of a parameter keep.

    `take` reads them from the pieces of the old mask, and `give` writes them to those of the new one. Both
    are called once for each piece, in the order of the pieces.

    Args:
        before: the old mask.
        after: the new mask.
        size: number of elements of all pieces.
    """

    def __init__(self, before: KeptElements, after: KeptElements, size: int) -> None:
        self._stay, self._stayed = before.also_in(after, size), after.also_in(before, size)
        self._count = int(self._stay.sum())
        self._values: dict[str, torch.Tensor] = {}
        self._taken = self._given = 0

    def take(self, piece: Piece, rest: torch.Tensor) -> None:
        """Copy the values of a piece from the bytes of its group."""
        stay = self._stay[piece.start : piece.stop]
        start, self._taken = self._taken, self._taken + int(stay.sum())
        for name, field in piece.views(rest).items():
            if name not in self._values:
                self._values[name] = torch.empty(self._count, dtype=field.dtype, device="cpu")
            self._values[name][start : self._taken] = field[stay]

    def give(self, piece: Piece, rest: torch.Tensor) -> None:
        """Replace the values of a piece: zeros for elements that the old mask did not keep."""
        stayed = self._stayed[piece.start : piece.stop]
        start, self._given = self._given, self._given + int(stayed.sum())
        for name, field in piece.views(rest).items():
            field.zero_()[stayed] = self._values[name][start : self._given]


@final
class StoredMasks:
    """The masks by which a store leaves out elements of parameters.

    A mask is set before the first values of its parameter are written, because masked values are dropped when
    they are written. It changes only under the lock of its stage.

    Attributes:
        first: chooses the first mask of each parameter; must be set if parameters have `ParamSpec.kept`.
    """

    def __init__(self) -> None:
        self.first: FirstMask | None = None
        self._kept: dict[ParamKey, KeptElements] = {}

    def of(self, stage: int, param: int) -> KeptElements | None:
        """Return the kept elements of a parameter; `None` if the store has all elements."""
        return self._kept.get((stage, param))

    def by_param(self, stage: int) -> Mapping[int, KeptElements]:
        """Return the kept elements of the parameters of a stage that have a mask, by index."""
        return {param: kept for (other, param), kept in self._kept.items() if other == stage}

    def begin(self, key: ParamKey, spec: ParamSpec, values: Callable[[], torch.Tensor]) -> None:
        """Choose the first mask of a parameter, if the store leaves out its masked elements.

        Args:
            key: the parameter.
            spec: the same.
            values: returns its values; called unless the mask was restored from a checkpoint.
        """
        if spec.kept is not None:
            assert self.first is not None, f"{spec.name} is masked, but nothing chooses its mask"
            self.put(key, spec, KeptElements(self.first(spec.name, values)))

    def put(self, key: ParamKey, spec: ParamSpec, kept: KeptElements) -> None:
        """Set the mask of a parameter. The caller writes the values of the parameter after this."""
        assert spec.kept is not None, f"the store has all elements of {spec.name}"
        assert kept.count <= spec.kept, f"{spec.name} has room for {spec.kept} elements, not {kept.count}"
        self._kept[key] = kept


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """Successive elements of a parameter that are read or written together: those of a piece, or a part.

    Attributes:
        piece: the piece.
        start: the first element.
        stop: one past the last element.
        first: the index in the piece's fields of the first kept element.
        places: the kept elements, counted from `start`; `None` if all elements are kept.
    """

    piece: Piece
    start: int
    stop: int
    first: int = 0
    places: torch.Tensor | None = None

    def fields(self, rest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the tensors of the piece for these elements, from the bytes of its group."""
        found = self.piece.views(rest)
        if self.places is None:
            return found
        part = slice(self.first, self.first + len(self.places))
        return {name: field[part] for name, field in found.items()}

    def chosen(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the values of the kept elements, 1-D, from those of all; a copy unless all are kept."""
        return dense if self.places is None else dense.view(-1)[self.places]

    def expanded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all elements from those of the kept ones, with zeros for the others.

        The result is a copy unless all elements are kept.
        """
        if self.places is None:
            return values
        return values.new_zeros(self.stop - self.start).index_copy_(0, self.places, values)


def ranges(piece: Piece, kept: KeptElements | None, most: int) -> Iterator[tuple[int, int]]:
    """Yield the range of elements of each run of a piece.

    Args:
        piece: the piece.
        kept: the kept elements of its parameter, if it is masked.
        most: largest number of elements of a run if the parameter is masked. The range of a piece may be much
            larger than the number of its kept elements.
    """
    if not piece.is_compact:
        yield piece.start, piece.stop
        return
    start, stop = _kept_of(piece, kept).range_of(piece)
    for at in range(start, stop, most):
        yield at, min(at + most, stop)


def runs(piece: Piece, kept: KeptElements | None, most: int) -> Iterator[Run]:
    """Yield the runs of a piece, in order; see `ranges`."""
    first = 0
    for start, stop in ranges(piece, kept, most):
        if piece.is_compact:
            places = _kept_of(piece, kept).places(start, stop)
            yield Run(piece, start, stop, first, places)
            first += len(places)
        else:
            yield Run(piece, start, stop)


@final
@dataclasses.dataclass(frozen=True)
class Operands:
    """The wire values and the gradient of a piece for its update, 1-D.

    Attributes:
        piece: the piece.
        wire: the wire values; changed by the update.
        gradient: the gradient; may be sparse, if the piece has all elements of its range.
        target: the wire values in the image from which `wire` was copied.
        places: the elements of `target` in `wire`; `None` if nothing was copied.
    """

    piece: Piece
    wire: torch.Tensor
    gradient: torch.Tensor
    target: torch.Tensor
    places: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        piece: Piece,
        spec: ParamSpec,
        kept: KeptElements | None,
        wire: torch.Tensor,
        gradient: torch.Tensor,
    ) -> Operands:
        """Return the operands of a piece.

        Args:
            piece: the piece.
            spec: its parameter.
            kept: the kept elements of the parameter, if it is masked.
            wire: the wire values of the parameter, 1-D in the order of memory.
            gradient: its gradient; dense or sparse.
        """
        if gradient.is_sparse:
            target = wire[piece.start : piece.stop]
            rows = rows_of(gradient, piece.start // spec.row_numel, piece.stop // spec.row_numel)
            return cls(piece, target, rows, target)
        flat = spec.in_memory_order(gradient)
        if not piece.is_compact:
            target = wire[piece.start : piece.stop]
            return cls(piece, target, flat[piece.start : piece.stop], target)
        start, stop = _kept_of(piece, kept).range_of(piece)
        places = _kept_of(piece, kept).places(start, stop)
        target = wire[start:stop]
        return cls(piece, _together(target, places), _together(flat[start:stop], places), target, places)

    def fields(self, rest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the tensors of the piece for as many elements, from the bytes of its group."""
        found = self.piece.views(rest)
        if self.places is None:
            return found
        return {name: field[: len(self.wire)] for name, field in found.items()}

    def put_back(self) -> None:
        """Copy the wire values to the image, if they are copies."""
        if self.places is not None:
            self.target.index_copy_(0, self.places, self.wire[: len(self.places)])


def _together(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the values at some places, followed by zeros up to a positive multiple of `UPDATE_ELEMENTS`."""
    count = len(places)
    out = torch.empty(round_up(max(count, 1), UPDATE_ELEMENTS), dtype=values.dtype, device="cpu")
    torch.index_select(values, 0, places, out=out[:count])
    out[count:] = 0
    return out


def _kept_of(piece: Piece, kept: KeptElements | None) -> KeptElements:
    assert kept is not None, f"parameter {piece.param} of a stage has no mask yet"
    return kept
