"""Masters whose bf16 wire values have the bits of torch's cast, which rounds ties to even."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from headwater.core.buffers import PAGE_BYTES
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.layout import Encoding, StageLayout, StateTensor, encoding_of, tie_bytes
from headwater.store.masters import join_at_once, read_master, split_at_once, write_master
from headwater.store.ties import lower_ties_at_once, raise_ties_at_once, tie_flags

UPPER = np.arange(2**16, dtype=np.uint32)
UPPER = UPPER[(UPPER >> 7) & 0xFF != 0xFF]  # finite
FINITE = st.integers(0, len(UPPER) - 1).map(lambda place: int(UPPER[place]))
LOWER = st.one_of(st.just(0x8000), st.sampled_from([0, 1, 0x7FFF, 0x8001, 0xFFFF]), st.integers(0, 0xFFFF))


def floats(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def bits_of(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def stored(master):
    """Return the wire values and the fields of masters. All memory is filled before with ones."""
    wire = torch.full(master.shape, -1, dtype=torch.int16).view(torch.bfloat16)
    low = torch.full(master.shape, -1, dtype=torch.int16)
    rest = {
        "master.low": low,
        "master.ties": torch.full((tie_bytes(master.numel()),), 255, dtype=torch.uint8),
    }
    write_master(Encoding.EVEN, master.clone(), wire, rest)
    return wire, rest


def assert_exact(master):
    wire, rest = stored(master)
    assert torch.equal(bits_of(wire), bits_of(master.to(torch.bfloat16)))
    read = read_master(Encoding.EVEN, wire, rest, torch.empty(master.numel() + 3))
    assert torch.equal(bits_of(read), bits_of(master))


@settings(deadline=None)
@given(arrays(np.uint32, st.integers(0, 70), elements=FINITE), LOWER)
def test_any_masters_are_cast_as_torch_casts_them_and_lose_no_bit(upper, lower):
    assert_exact(floats(upper << 16 | lower))


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_is_cast_as_torch_casts_it(lower):
    assert_exact(floats(UPPER << 16 | np.uint32(lower)))


def test_few_ties_in_several_chunks():
    """The list of ties is made chunk by chunk; here the last byte has bits for three elements."""
    master = torch.randn((1 << 21) + 3, generator=torch.Generator().manual_seed(0))
    bits = bits_of(master)
    for place in (0, 7, 8, (1 << 20) - 1, 1 << 20, 1 << 21, (1 << 21) + 2):
        bits[place] = bits[place] >> 17 << 17 | 1 << 15  # an even upper half, so that it is rounded down
    assert_exact(master)
    assert int(np.unpackbits(stored(master)[1]["master.ties"].numpy()).sum()) >= 7


@pytest.mark.parametrize("lower", [1, 0x8000])
@pytest.mark.parametrize("count", [1, 7, 8, 1001])
def test_a_gpu_stores_the_same_bits(lower, count):
    """A GPU raises and lowers ties with other operators, which this test runs on the CPU."""
    upper = np.concatenate([UPPER[:count], UPPER[-count:]])[-count - count // 2 :][:count]  # both signs
    master = floats(upper << 16 | np.uint32(lower))
    wire, rest = stored(master)
    high, low = torch.empty_like(wire), torch.empty(count, dtype=torch.int16)
    ties, flags = (
        torch.full((size,), 255, dtype=torch.uint8) for size in (tie_bytes(count), tie_flags(count))
    )
    split_at_once(master.clone(), high, low)
    lower_ties_at_once(high, low, ties, flags)
    assert torch.equal(bits_of(high), bits_of(wire)) and torch.equal(ties, rest["master.ties"])
    joined = torch.empty_like(master)
    join_at_once(high, low, joined)
    raise_ties_at_once(joined, ties, flags.fill_(255))
    assert torch.equal(bits_of(joined), bits_of(master))


@pytest.mark.parametrize("encoding", [Encoding.SPLIT, Encoding.EVEN])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000])
def test_a_master_that_is_not_a_number_computes_as_one(bits, encoding):
    """The first is the NaN of CUDA. Rounding would make zeros of it."""
    master = floats([bits, 0x3F800000])
    wire = torch.zeros(2, dtype=torch.bfloat16)
    rest = {"master.low": torch.zeros(2, dtype=torch.int16), "master.ties": torch.zeros(1, dtype=torch.uint8)}
    write_master(encoding, master.clone(), wire, rest)
    read = read_master(encoding, wire, rest, torch.empty(2))
    assert wire.isnan().tolist() == read.isnan().tolist() == [True, False]
    high, low = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int16)
    split_at_once(master.clone(), high, low)
    assert high.isnan().tolist() == [True, False]


def test_an_empty_parameter_shares_no_page_with_its_neighbours():
    spec = [
        ParamSpec(name, (size,), torch.float32, torch.float32)
        for name, size in (("a", 16), ("b", 0), ("c", 16))
    ]
    moments = {"moment": StateTensor(torch.float32, None)}
    (group,) = StageLayout(StageSpec(0, "s", tuple(spec)), [moments] * 3, elementwise=True).groups
    empty = dataclasses.replace(group, pieces=group.pieces[1:2])
    assert empty.pieces[0].fields[0].offset % PAGE_BYTES and empty.pages_of({"moment"}) == []
    assert len(group.pages_of({"moment"})) == 1


def test_only_parameters_that_a_cast_must_match_have_the_bits():
    specs = [
        ParamSpec("a", (9,), torch.float32, torch.bfloat16),
        ParamSpec("b", (9,), torch.float32, torch.bfloat16, exact_cast=True),
        ParamSpec("c", (9,), torch.float32, torch.float32, exact_cast=True),
        ParamSpec("d", (9,), torch.float32, torch.float16, exact_cast=True),
    ]
    assert [encoding_of(spec) for spec in specs] == [
        Encoding.SPLIT, Encoding.EVEN, Encoding.SAME, Encoding.COPY
    ]  # fmt: skip
    layout = StageLayout(StageSpec(0, "s", tuple(specs)), [{}] * 4, elementwise=True)
    sizes = {
        (specs[piece.param].name, field.name): field.shape
        for group in layout.groups
        for piece in group.pieces
        for field in piece.fields
    }
    assert sizes == {
        ("a", "master.low"): (9,),
        ("b", "master.low"): (9,),
        ("b", "master.ties"): (2,),
        ("d", "master"): (9,),
    }


def test_masked_elements_stay_stored_where_a_cast_must_be_matched():
    spec = ParamSpec("a", (64, 64), torch.float32, torch.bfloat16)
    assert spec.keeping(100).kept == 128
    exact = ParamSpec("a", (64, 64), torch.float32, torch.bfloat16, exact_cast=True)
    assert exact.keeping(100) == exact
