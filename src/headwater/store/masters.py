"""Masters without stored duplicates: an fp32 number is kept as a bf16 wire value and a 16-bit remainder.

Read as integers, an fp32 master is `(high << 16) + low` with `low` its lower sixteen bits as a signed number.
Then `high` is the master rounded to the nearest bf16 (ties away from zero), so the wire copy costs nothing
beyond the master's own four bytes, and no bit of the master is lost, except that a NaN may get other bits.
Where ties must be rounded to even, see [Note: ties to even] in `store/ties.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch

from headwater.store.layout import MASTER_FIELD, TIES_FIELD, Encoding
from headwater.store.ties import lower_ties, raise_ties, tie_flags

_CPU = torch.device("cpu")

_CHUNK_ELEMENTS = 1 << 18
"""Elements that one pass joins or splits: few enough to stay in a core's cache for the next pass."""

_THREAD_ELEMENTS = 1 << 15
"""torch gives each thread at least this many elements, so that more than 8 threads need longer chunks."""


def join_halves(
    high: torch.Tensor, low: torch.Tensor, out: torch.Tensor, bits: torch.Tensor | None = None
) -> None:
    """Join bf16 wire values and int16 lower halves to fp32 masters, and write these to `out`. All are 1-D.

    Args:
        high: wire values, bf16.
        low: lower halves, int16.
        out: the masters, fp32; overwritten.
        bits: int32 memory of at least `num_bits` elements, used on a CPU; allocated if not given.
    """
    if out.device.type != "cpu":
        join_at_once(high, low, out)
        return
    if bits is None:
        bits = torch.empty(num_bits(Encoding.SPLIT, out.numel(), out.device), dtype=torch.int32, device="cpu")
    for upper, lower, whole in _chunks(high, low, out):
        whole.copy_(upper)  # as bits: the upper half, shifted to its place
        wide = bits[: lower.numel()].copy_(lower)  # a sum of two dtypes would be three times slower
        whole.view(torch.int32).add_(wide)


def join_at_once(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
    """Do the same as `join_halves` with the fewest operators: on a GPU each operator starts a kernel."""
    out.view(torch.int32).copy_(low).add_(high.view(torch.int16), alpha=1 << 16)


def split_halves(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split fp32 masters into bf16 wire values and int16 lower halves: undoes `join_halves`.

    Args:
        master: fp32, 1-D; its content is undefined afterwards.
        high: wire values, bf16; overwritten.
        low: lower halves, int16; overwritten.
    """
    if master.device.type != "cpu":
        split_at_once(master, high, low)
        return
    for upper, lower, whole in _chunks(high, low, master):
        _canonical(whole)
        bits = whole.view(torch.int32)
        # The copy keeps the lower 16 bits: integer conversion truncates.
        lower.copy_(bits)
        # After the lower half was copied, because this changes the bits in place.
        bits.add_(0x8000).bitwise_right_shift_(16)
        upper.view(torch.int16).copy_(bits)


def split_at_once(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Do the same as `split_halves` with the fewest operators: on a GPU each operator starts a kernel."""
    bits = _canonical(master).view(torch.int32)
    low.copy_(bits)
    torch.bitwise_right_shift(bits.add_(0x8000), 16, out=high.view(torch.int16))


def _canonical(master: torch.Tensor) -> torch.Tensor:
    """Give each NaN the bits 0x7fc00000, in place. Rounding would turn some NaNs into zeros or infinities."""
    return master.nan_to_num_(torch.nan, torch.inf, -torch.inf)


def num_bits(encoding: Encoding, numel: int, device: torch.device) -> int:
    """Return the number of int32 elements that `read_master` and `write_master` need as memory.

    Args:
        encoding: how the master is stored.
        numel: its number of elements.
        device: where it is.
    """
    if encoding not in (Encoding.SPLIT, Encoding.EVEN):
        return 0
    if device.type == "cpu":
        return min(numel, _chunk_elements())
    return tie_flags(numel) // 4 if encoding is Encoding.EVEN else 0


def _flags(numel: int, device: torch.device, bits: torch.Tensor | None) -> torch.Tensor | None:
    """Return the memory that `raise_ties` and `lower_ties` need on a GPU: a part of `bits`."""
    if device.type == "cpu":
        return None
    assert bits is not None, "a GPU may allocate no memory here"
    return bits.view(torch.uint8)[: tie_flags(numel)]


def _chunk_elements() -> int:
    return max(_CHUNK_ELEMENTS, _THREAD_ELEMENTS * torch.get_num_threads())


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    count = _chunk_elements()
    if tensors[0].numel() <= count:  # most parameters; a split would take longer than the operators
        return iter((tensors,))
    return zip(*(tensor.split(count) for tensor in tensors), strict=True)


def read_master(
    encoding: Encoding,
    wire: torch.Tensor,
    rest: Mapping[str, torch.Tensor],
    scratch: torch.Tensor,
    bits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the master of a piece: a view of it, or a copy in `scratch` if it is stored in two halves.

    Args:
        encoding: how it is stored.
        wire: the piece's wire values, 1-D.
        rest: the piece's fields.
        scratch: fp32 workspace, 1-D, at least as long as the piece.
        bits: int32 memory of at least `num_bits` elements; allocated if not given, but not on a GPU.
    """
    if encoding is Encoding.SAME:
        return wire
    field = rest[MASTER_FIELD[encoding]].view(-1)
    if encoding is Encoding.COPY:
        return field
    out = scratch[: wire.numel()]
    join_halves(wire, field, out, bits)
    if encoding is Encoding.EVEN:
        raise_ties(out, rest[TIES_FIELD], _flags(out.numel(), out.device, bits))
    return out


def write_master(
    encoding: Encoding,
    master: torch.Tensor,
    wire: torch.Tensor,
    rest: Mapping[str, torch.Tensor],
    bits: torch.Tensor | None = None,
) -> None:
    """Write a master back to where `read_master` found it, and compute its wire value.

    Allocates no memory on a GPU.

    Args:
        encoding: how it is stored.
        master: the tensor that `read_master` has returned, changed. Its content may be overwritten.
        wire: the piece's wire values, 1-D.
        rest: the piece's fields.
        bits: as in `read_master`.
    """
    if encoding is Encoding.SAME:
        if wire.data_ptr() != master.data_ptr():
            wire.copy_(master)
        return
    field = rest[MASTER_FIELD[encoding]].view(-1)
    if encoding is Encoding.COPY:
        if field.data_ptr() != master.data_ptr():
            field.copy_(master)
        wire.copy_(field)
        return
    split_halves(master, wire, field)
    if encoding is Encoding.EVEN:
        lower_ties(wire, field, rest[TIES_FIELD], _flags(wire.numel(), wire.device, bits))


@final
class Workspaces(threading.local):
    """Scratch memory for each thread, which is allocated once and reused."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.device], torch.Tensor] = {}

    def get(self, name: str, numel: int, device: torch.device = _CPU) -> torch.Tensor:
        """Return an uninitialised fp32 tensor of `numel` elements: the same memory for the same name."""
        key = name, device
        if key not in self._tensors or self._tensors[key].numel() < numel:
            # Freed first: the plan does not count the old and the new memory together.
            self._tensors.pop(key, None)
            self._tensors[key] = torch.empty(numel, dtype=torch.float32, device=device)
        return self._tensors[key][:numel]

    def clear(self) -> None:
        """Free the memory of the calling thread."""
        self._tensors.clear()

    def shares(self, sizes: Sequence[int], device: torch.device) -> Iterator[Callable[[str], torch.Tensor]]:
        """Yield one function for each size, which returns a tensor of that size by name.

        For the same name, these functions return separate parts of one tensor.
        """
        total, end = sum(sizes), 0
        for size in sizes:
            begin, end = end, end + size
            yield lambda name, place=slice(begin, end): self.get(name, total, device)[place]  # type: ignore[misc]
