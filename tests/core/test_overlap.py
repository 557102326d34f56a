"""Tensors that share memory."""

import pytest
import torch

from headwater.core.overlap import overlapping

BASE = torch.zeros(6, 8)


@pytest.mark.parametrize(
    "first, second, overlap",
    [
        (BASE, BASE, True),
        (BASE, BASE.t(), True),
        (BASE[:3], BASE[2:], True),
        (BASE[:3], BASE[3:], False),
        (BASE[:, ::2], BASE[:, 1::2], False),
        (BASE[:, ::2], BASE[:, 1::3], True),
        (BASE[:, :4], BASE[:, 4:], False),
        (BASE[0].expand(5, 8), BASE[1:], False),
        (BASE[0].expand(5, 8), BASE[0], True),
        (BASE[1:1], BASE, False),
        (BASE, BASE.clone(), False),
        (BASE.to("meta"), BASE.to("meta"), False),
        (BASE.view(torch.int16)[0, 1:2], BASE[0, :1], True),
    ],
)
def test_elements_in_common(first, second, overlap):
    given = {"a": first, "c": torch.zeros(3), "b": second}
    assert (overlapping(given) is not None) == overlap
    assert (overlapping(dict(reversed(given.items()))) is not None) == overlap
