"""The order of samples depends only on seed and epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import ConfigError, DataError
from headwater.data.order import SampleOrder, permutation


def samples_at(order, start, stop):
    """Return the numbers of the samples at the positions [start, stop)."""
    return order.draws(start, stop) % order.num_samples


def batches(order, start, count):
    """Return the local parts of at most `count` global batches from position `start`."""
    found = []
    while len(found) < count and (stop := order.next_position(start)) is not None:
        found.append(order.local_draws(start, stop) % order.num_samples)
        start = stop
    return found


@given(
    num_samples=st.integers(8, 50),
    local_size=st.integers(1, 4),
    world_size=st.integers(1, 2),
    shuffle=st.booleans(),
    repeat=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 1 << 62),
)
def test_the_ranks_share_each_global_batch(
    num_samples, local_size, world_size, shuffle, repeat, drop_last, seed
):
    settings = {"shuffle": shuffle, "repeat": repeat, "drop_last": drop_last, "seed": seed}
    size = local_size * world_size
    whole = batches(SampleOrder(num_samples, size, **settings), 0, 30)
    ranks = [
        batches(SampleOrder(num_samples, size, rank=rank, world_size=world_size, **settings), 0, 30)
        for rank in range(world_size)
    ]
    assert len(whole) == len(ranks[0]) == len(ranks[-1])
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert batch.tolist() == np.concatenate(parts).tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= (0 if len(batch) == size else 1)


@given(
    num_samples=st.integers(1, 60), epoch=st.integers(0, 3), shuffle=st.booleans(), seed=st.integers(0, 99)
)
def test_every_epoch_holds_every_sample_once(num_samples, epoch, shuffle, seed):
    order = SampleOrder(num_samples, 1, shuffle=shuffle, seed=seed)
    samples = samples_at(order, epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(samples.tolist()) == list(range(num_samples))


@given(st.integers(2, 40), st.integers(1, 90), st.integers(0, 90))
def test_the_stream_does_not_depend_on_the_batch_size(num_samples, first, second):
    order = SampleOrder(num_samples, 1, shuffle=True, seed=5)
    parts = [samples_at(order, 0, first), samples_at(order, first, first + second)]
    assert np.concatenate(parts).tolist() == samples_at(order, 0, first + second).tolist()


def test_epochs_and_seeds_differ():
    order, other = (SampleOrder(100, 1, shuffle=True, seed=seed) for seed in (1, 2))
    first = samples_at(order, 0, 100).tolist()
    assert first not in (
        samples_at(order, 100, 200).tolist(),
        samples_at(other, 0, 100).tolist(),
        list(range(100)),
    )


def test_order_is_the_same_as_in_earlier_versions():
    """If these numbers changed, every existing checkpoint would resume in another order."""
    assert permutation(10, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert samples_at(SampleOrder(10, 1, shuffle=True, seed=1), 8, 12).tolist() == [6, 3, 3, 7]


def test_a_single_pass_ends():
    dropping, keeping = (SampleOrder(10, 4, repeat=False, drop_last=drop) for drop in (True, False))
    assert [batch.tolist() for batch in batches(dropping, 0, 9)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches(keeping, 0, 9)[2].tolist() == [8, 9]


def test_a_batch_that_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)batch_size 10 .*4 ranks.*write 8 or 12"):
        SampleOrder(100, 10, world_size=4)
    for repeat in (True, False):
        with pytest.raises(
            DataError, match=r"(?s)too few samples for one batch: batch_size is 4, got 3.*at most 3"
        ):
            SampleOrder(3, 4, repeat=repeat)
    assert SampleOrder(3, 4, repeat=False, drop_last=False).end == 3
