"""Masters in fewer bytes: an fp32 number as a bf16 wire value and what is missing from it.

Read as integers, an fp32 master is `(high << 16) + low` with `low` its lower sixteen bits as a signed number.
Then `high` is the master rounded to the nearest bf16 (ties away from zero), so the wire copy costs nothing
beyond the master's own four bytes, and no bit of the master is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.store.layout import MASTER_FIELD, Encoding


def join_halves(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
    """`out` (fp32) from a bf16 wire value and the lower half (int16)."""
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(low)


def split_halves(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """The inverse of `join_halves`; the contents of `master` are lost."""
    bits = master.view(torch.int32)
    low.copy_(bits)
    bits.add_(0x8000).bitwise_right_shift_(16)
    high.view(torch.int16).copy_(bits)


def read_master(
    encoding: Encoding, wire: torch.Tensor, rest: Mapping[str, torch.Tensor], scratch: torch.Tensor
) -> torch.Tensor:
    """The fp32 master of a piece: a view where there is one, else written to `scratch` (1-D, long enough).

    Args:
        encoding: how it is kept.
        wire: the piece's wire values, 1-D.
        rest: the piece's fields.
        scratch: fp32 workspace.
    """
    if encoding is Encoding.SAME:
        return wire
    field = rest[MASTER_FIELD[encoding]].view(-1)
    if encoding is Encoding.COPY:
        return field
    out = scratch[: wire.numel()]
    join_halves(wire, field, out)
    return out


def write_master(
    encoding: Encoding, master: torch.Tensor, wire: torch.Tensor, rest: Mapping[str, torch.Tensor]
) -> None:
    """Put a master back where `read_master` found it; `master` may be overwritten on the way."""
    if encoding is Encoding.SPLIT:
        split_halves(master, wire, rest[MASTER_FIELD[encoding]].view(-1))
    elif encoding is Encoding.COPY:
        field = rest[MASTER_FIELD[encoding]].view(-1)
        if field.data_ptr() != master.data_ptr():
            field.copy_(master)
        wire.copy_(field)
    elif wire.data_ptr() != master.data_ptr():
        wire.copy_(master)
