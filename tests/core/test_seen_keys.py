"""Masks of attention, and the keys that they let queries see."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headwater.core.dry_run import counting_costs
from headwater.core.seen_keys import seen_keys

BATCHES, LENGTH = 3, 6


def padding(*counts, rows=LENGTH, causal=False):
    """Return the mask of sequences whose padding begins after `counts` keys."""
    mask = (torch.arange(LENGTH) < torch.tensor(counts)[:, None])[:, None, None].repeat(1, 1, rows, 1)
    return mask & torch.ones(rows, LENGTH, dtype=torch.bool).tril() if causal else mask


def changed(mask, value, *place):
    mask[place] = value
    return mask


@pytest.mark.parametrize(
    ("mask", "causal", "counts"),
    [
        (padding(6, 2, 4), False, [6, 2, 4]),
        (padding(6, 2, 4, rows=1), False, [6, 2, 4]),
        (padding(6, 2, 4, causal=True), True, [6, 2, 4]),
        (padding(6, 6, 6, causal=True), True, [6, 6, 6]),
        (padding(5), False, [5, 5, 5]),
        (padding(5, causal=True), True, [5, 5, 5]),
        (padding(1, 1, 1, causal=True), False, [1, 1, 1]),
    ],
)
def test_the_first_keys_of_each_sequence(mask, causal, counts):
    seen = seen_keys(mask, BATCHES, LENGTH, LENGTH)
    assert seen.causal is causal and seen.counts.tolist() == counts


@pytest.mark.parametrize(
    "mask",
    [
        padding(6, 2, 4).flip(-1),  # padding before the text
        padding(6, 0, 4),
        padding(6, 0, 4, causal=True),
        changed(padding(6, 2, 4), False, 0, 0, 3, 1),
        changed(padding(6, 2, 4), False, 0, 0, 0, 1),
        changed(padding(6, 2, 4, causal=True), True, 2, 0, 1, 3),
        changed(padding(6, 2, 4, causal=True), False, 2, 0, 3, 0),  # such as in a window
        padding(6, 2, 4).float(),
        padding(6, 2, 4).repeat(1, 2, 1, 1),
        padding(6, 2, 4)[0, 0],
        padding(6, 2, 4)[:2],
        padding(6, 2, 4)[:, :, :3],
        padding(6, 2, 4)[..., :3],
    ],
)
def test_other_masks_are_not_described(mask):
    assert seen_keys(mask, BATCHES, LENGTH, LENGTH) is None


def test_a_causal_mask_of_more_keys_than_queries_begins_at_the_first_key():
    mask = torch.ones(1, 1, 3, LENGTH, dtype=torch.bool)
    assert seen_keys(mask.tril(), 1, 3, LENGTH).causal
    assert seen_keys(mask.tril(LENGTH - 3), 1, 3, LENGTH) is None


def test_a_mask_without_values_is_not_described():
    with FakeTensorMode():
        assert seen_keys(padding(6, 2, 4), BATCHES, LENGTH, LENGTH) is None


def test_a_dry_run_takes_a_mask_of_keys_for_padding():
    with counting_costs():
        assert not seen_keys(padding(6, 2, 4, rows=1), BATCHES, LENGTH, LENGTH).causal
        assert seen_keys(padding(6, 2, 4).flip(-1), BATCHES, LENGTH, LENGTH) is None
