"""Messages between ranks: values survive a round trip, and arbitrary bytes can only be refused."""

import dataclasses
import json
import pickle
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from headwater.core.errors import CheckpointError, HeadwaterError, RankError
from headwater.core.precision import Precision
from headwater.fabric import codec
from headwater.fabric.codec import decode, encode
from headwater.plan.types import Activations, Plan, Resources
from headwater.trainer.start import Start


@dataclasses.dataclass(frozen=True)
class Sample:
    number: int
    where: Path | None
    kinds: tuple[Activations, ...]
    by_key: dict[tuple[int, int], torch.Tensor]


SAMPLE = Sample(3, Path("/a"), (Activations.KEEP,), {(0, 1): torch.arange(6.0).reshape(2, 3)})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        (True, bool),
        (3, int),
        (float("inf"), float),
        ("ü\0", str),
        (torch.bfloat16, torch.dtype),
        ((1, "a"), tuple[int, str]),
        ((), tuple[int, ...]),
        ([1, 2], Sequence[int]),
        ({"a": None}, Mapping[str, str | None]),
        ({"step": 3, "x": [1.5, {"y": None}]}, Any),
        ("dynamic", float | Literal["dynamic"]),
        (Precision("bf16"), Precision),
        (Resources(disk=Path("x")), Resources | None),
    ],
)
def test_decode_inverts_encode(value, kind):
    assert decode(encode(value, kind), kind) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_are_bit_identical_after_a_round_trip(dtype, shape):
    value = torch.randn(shape).to(dtype)
    found = decode(encode(value, torch.Tensor), torch.Tensor)
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(found, value)


def test_an_error_is_decoded_to_its_project_class():
    class Special(CheckpointError):
        pass

    kind = HeadwaterError | None
    found = decode(encode(Special("what", where="here", remedy="do"), kind), kind)
    assert (type(found), found.what, found.where, found.remedy) == (CheckpointError, "what", "here", "do")


class Harmful:
    ran = False

    def __reduce__(self):
        return _harm, ()


def _harm():
    Harmful.ran = True
    return 256


@pytest.mark.parametrize("kind", [int, Any, Plan, list[Path], HeadwaterError | None, torch.Tensor])
def test_a_pickle_is_refused_and_not_run(kind):
    for message in (pickle.dumps(Harmful()), struct.pack("<I", 9) + pickle.dumps(Harmful())):
        with pytest.raises(RankError, match="expected a message with"):
            decode(message, kind)
    assert not Harmful.ran


def raw(plain, *blobs, sizes=None):
    header = json.dumps([plain, [len(blob) for blob in blobs] if sizes is None else sizes]).encode()
    return struct.pack("<I", len(header)) + header + b"".join(blobs)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (b"", int),
        (struct.pack("<I", 1 << 31), int),
        (raw(True), int),
        (raw(1, b"more"), int),
        (raw(1, b"x", sizes=[-1]), int),
        (raw(1, sizes=[1e300]), int),
        (raw(1, sizes={}), int),
        (raw(1) + b"x", int),
        (struct.pack("<I", 100_000) + b"[" * 100_000, Any),
        (struct.pack("<I", 9_010) + b"[" + b"1" * 9_004 + b",[]] ", int),
        (raw("RuntimeError"), HeadwaterError),
        (raw(["annotations", "a", [1, None], [1, None]]), HeadwaterError),
        (raw(["__dict__", "a", [1, None], [1, None]]), HeadwaterError),
        (raw([7, None]), int | None),
        (raw(["float32", [2], 0], b"1234"), torch.Tensor),
        (raw(["float32", [-1, -1], 0], b"1234"), torch.Tensor),
        (raw(["qint8", [4], 0], b"1234"), torch.Tensor),
        (raw(["float32", [1], 1], b"1234"), torch.Tensor),
        (raw([["float32", [1], 0], ["float32", [1], 0]], b"1234"), list[torch.Tensor]),
        (raw([[1, 2], [1, 3]]), dict[int, int]),
        (raw([[[], 2]]), dict[Any, int]),
        (raw({"name": "fp8", "loss_scale": [0, 1.0]}), Precision),
        (raw({"name": "bf16"}), Precision),
        (raw("burn"), Activations),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_message_of_another_kind_is_refused(message, kind):
    with pytest.raises(RankError, match="expected a message with"):
        decode(message, kind)


def test_damaged_messages_are_refused_or_decode_to_the_expected_kind():
    draw = random.Random(0)
    whole = encode(SAMPLE, Sample)
    assert torch.equal(decode(whole, Sample).by_key[0, 1], SAMPLE.by_key[0, 1])
    refused = 0
    for _ in range(3000):
        message = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            change = draw.randrange(3)
            at = draw.randrange(len(message))
            if change == 0:
                message[at] = draw.randrange(256)
            elif change == 1:
                del message[at : at + draw.randint(1, 9)]
            else:
                message[at:at] = draw.randbytes(draw.randint(1, 9))
        try:
            found = decode(message, Sample)
        except RankError:
            refused += 1
        else:
            assert type(found.number) is int and isinstance(found.where, Path | None)
            assert all(isinstance(each, Activations) for each in found.kinds)
    assert refused > 2000


@pytest.mark.parametrize("kind", [Plan, Start])
def test_types_passed_to_agree_can_be_encoded(kind):
    waiting, seen = [kind], []
    while waiting:
        kind = waiting.pop()
        if kind in seen or kind is Ellipsis:
            continue
        seen.append(kind)
        rules = [condition for condition, *_ in codec._RULES if condition(kind)]
        assert rules, f"{kind} is of no kind that ranks send"
        is_literal = get_origin(kind) is Literal
        waiting += [] if is_literal else get_args(kind)
        waiting += get_type_hints(kind).values() if rules[0] is dataclasses.is_dataclass else ()
    assert len(seen) > 5


def test_a_value_of_an_unsupported_type_is_refused():
    for value, kind in ((3.0, int), ("a", int | None), (object(), Any), (SAMPLE, Precision)):
        with pytest.raises(TypeError):
            encode(value, kind)
