"""An fp32 master is stored as a bf16 wire value and a lower half, which lose no bit."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.store.layout import Encoding
from headwater.store.masters import (
    join_at_once,
    join_halves,
    read_master,
    split_at_once,
    split_halves,
    write_master,
)

FINITE_BITS = st.integers(0, 2**32 - 1).filter(lambda bits: (bits >> 23) & 0xFF != 0xFF)


def floats(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def split(master):
    high, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_halves(master.clone(), high, low)
    return high, low


@settings(deadline=None)
@given(arrays(np.uint32, st.integers(1, 64), elements=FINITE_BITS))
def test_splitting_and_joining_a_master_loses_no_bit(bits):
    master = floats(bits)
    out = torch.full_like(master, float("nan"))
    join_halves(*split(master), out)
    assert torch.equal(out.view(torch.int32), master.view(torch.int32))


@settings(deadline=None)
@given(arrays(np.uint32, st.integers(1, 64), elements=FINITE_BITS))
def test_the_wire_value_is_a_nearest_bf16_value(bits):
    master = floats(bits).double()
    high, _ = split(master.float())
    nearest = master.float().to(torch.bfloat16)
    finite = nearest.isfinite()  # beyond the largest bf16 both are infinite
    assert torch.equal(high.isfinite(), finite)
    error, smallest = (high.double() - master).abs(), (nearest.double() - master).abs()
    assert torch.equal(error[finite], smallest[finite])


def test_every_upper_half_is_joined_without_loss():
    upper = np.arange(2**16, dtype=np.uint32)
    upper = upper[(upper >> 7) & 0xFF != 0xFF]
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = floats((upper << 16) | lower)
        out = torch.empty_like(master)
        join_halves(*split(master), out)
        assert torch.equal(out.view(torch.int32), master.view(torch.int32))


def test_ties_are_rounded_away_from_zero():
    master = floats([0x3F808000, 0xBF808000, 0x3F807FFF])
    high, _ = split(master)
    assert high.view(torch.int16).tolist() == [0x3F81, 0xBF81 - 2**16, 0x3F80]


def test_every_master_has_the_same_halves_on_a_gpu():
    """A GPU splits and joins with other operators, which this test runs on the CPU. NaN has the same bits."""
    upper = np.arange(2**16, dtype=np.uint32)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = floats((upper << 16) | lower)
        high, low = split(master)
        its_high, its_low = torch.empty_like(high), torch.empty_like(low)
        split_at_once(master.clone(), its_high, its_low)
        assert torch.equal(its_high.view(torch.int16), high.view(torch.int16)) and torch.equal(its_low, low)
        joined, its_joined = torch.empty_like(master), torch.empty_like(master)
        join_halves(high, low, joined)
        join_at_once(high, low, its_joined)
        assert torch.equal(its_joined.view(torch.int32), joined.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 16])
def test_chunks_occupy_all_threads_and_do_not_change_the_bits(threads, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    longest = []

    class Lengths(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.copy_.default:
                longest.append(out.numel())
            return out

    master = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    high, low = torch.empty(1 << 20, dtype=torch.bfloat16), torch.empty(1 << 20, dtype=torch.int16)
    with Lengths():
        split_halves(master.clone(), high, low)
    joined = torch.empty_like(master)
    join_halves(high, low, joined)
    assert torch.equal(joined, master)
    assert max(longest) == max(1 << 18, threads << 15)


@pytest.mark.parametrize(
    ("encoding", "wire_dtype", "field"),
    [
        (Encoding.SAME, torch.float32, None),
        (Encoding.SPLIT, torch.bfloat16, ("master.low", torch.int16)),
        (Encoding.EVEN, torch.bfloat16, ("master.low", torch.int16)),
        (Encoding.COPY, torch.float16, ("master", torch.float32)),
    ],
)
def test_a_written_master_is_read_back(encoding, wire_dtype, field):
    master = torch.randn(100, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(100, dtype=wire_dtype)
    rest = {} if field is None else {field[0]: torch.empty(100, dtype=field[1])}
    if encoding is Encoding.EVEN:
        rest["master.ties"] = torch.empty(13, dtype=torch.uint8)
    write_master(encoding, master.clone(), wire, rest)
    assert torch.equal(read_master(encoding, wire, rest, torch.empty(128)), master)
    assert torch.equal(wire, master.to(wire_dtype))
