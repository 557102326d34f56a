"""Stochastic rounding of optimizer state to bf16.

Rounding to the nearest bf16 loses every change below 1/512 of a value. Adam's second moment shrinks by at
most 1/1000 in a step (beta2 = 0.999), so it would never shrink. Stochastic rounding chooses one of the two
neighbours at random; the nearer one is more likely. Its mean is the exact value, and small changes add up.

The random numbers of an element depend on its parameter, its state tensor, its index and the number of the
update, and on nothing else. So a run on another tier, or a resumed run, computes the same bits. There is one
exception: a resumed loop of the user with an optimizer that does not count its steps (SGD). There the numbers
of updates begin at 1 again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import torch

TABLE_ELEMENTS = 1 << 18
"""Elements in the table of random numbers, and in a pass over the values: few enough to stay in the cache."""

_DEVICE_ROWS = 64
"""Number of tables that one pass covers on devices other than the CPU, where a kernel takes long to start."""


def round_stochastically(values: torch.Tensor, out: torch.Tensor, *, stream: str, start: int = 0) -> None:
    """Round each fp32 value to one of its two bf16 neighbours, at random with the exact value as mean.

    A value that bf16 has exactly keeps its bits. Infinity stays infinity.

    Args:
        values: fp32, 1-D; their content is undefined afterwards.
        out: bf16, 1-D, of the same length; overwritten.
        stream: name of the sequence of random numbers.
        start: the place of the first value in this sequence. Rounding a tensor in parts, each with its own
            start, gives the same bits as rounding the whole.
    """
    begin = place_of(stream, start)
    noise = _table(values.device)[begin : begin + TABLE_ELEMENTS]
    rows = 1 if values.device.type == "cpu" else _DEVICE_ROWS
    for exact, rounded in zip(_passes(values, rows), _passes(out, rows), strict=True):
        # Integer noise below 2^16 carries into the upper half with a probability of (lower half) / 2^16.
        bits = exact.view(torch.int32).add_(noise[: exact.shape[-1]]).bitwise_right_shift_(16)
        rounded.view(torch.int16).copy_(bits)


def state_stream(param: str, state: str, count: int) -> str:
    """Return the name of the sequence of random numbers for one state tensor in one update.

    Args:
        param: name of the parameter.
        state: name of the state tensor.
        count: number of the update, from 1. It is the optimizer's own count if it has one: checkpoints keep
            that, and a resumed loop continues with it.
    """
    return f"{param} {state} {count}"


def place_of(stream: str, start: int) -> int:
    """Return the place in `random_numbers` of a sequence's element number `start`.

    A sequence consists of consecutive numbers of the table. After the end of the table it continues at the
    beginning.
    """
    return (_first_place(stream) + start) % TABLE_ELEMENTS


def random_numbers() -> torch.Tensor:
    """Return the table in host memory: `TABLE_ELEMENTS` random numbers in int32, twice in a row."""
    return _table(torch.device("cpu"))


def prepare_rounding(device: torch.device) -> None:
    """Allocate all memory that `round_stochastically` needs on a device."""
    _table(device)


def _passes(values: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """Yield views of 1-D values in order: up to `rows` rows as long as the table at a time, then the rest."""
    whole = values.numel() // TABLE_ELEMENTS * TABLE_ELEMENTS
    yield from values[:whole].view(-1, TABLE_ELEMENTS).split(rows)
    if whole < values.numel():
        yield values[whole:]


def _first_place(stream: str) -> int:
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Return random numbers from 0 to 65,535 in int32, twice in a row so that a pass may begin anywhere.

    Each number occurs equally often, so rounding has no bias.
    """
    generator = torch.Generator().manual_seed(0)
    once = (
        torch.randperm(TABLE_ELEMENTS, generator=generator, device="cpu").bitwise_and_(0xFFFF).to(torch.int32)
    )
    return torch.cat([once, once]).to(device)
