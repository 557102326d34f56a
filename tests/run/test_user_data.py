"""Passes over loaders of any kind, batches of any kind, and metrics wherever they are kept."""

import itertools
import random
import types

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headwater.core.batches import num_samples, split_batch
from headwater.core.errors import DataError
from headwater.metrics import AccuracyMetric
from headwater.trainer.batches import equal_part, num_tokens
from headwater.trainer.metrics import find_metrics, metric_values
from headwater.trainer.user_data import Passes, RepeatedPass, RepeatedPasses


class Noise:
    """Yield three batches of noise from every source of random numbers."""

    def __iter__(self):
        return (torch.tensor([[torch.rand(()), random.random(), np.random.rand()]]) for _ in range(3))


def own_generator(**options):
    generator = torch.Generator().manual_seed(4)
    return DataLoader(range(7), batch_size=2, shuffle=True, generator=generator, **options)


def sampler_with_generator():
    sampler = RandomSampler(range(7), generator=torch.Generator().manual_seed(4))
    return DataLoader(range(7), batch_sampler=BatchSampler(sampler, 2, drop_last=True))


LOADERS = [Noise, own_generator, sampler_with_generator, lambda: DataLoader(range(7), shuffle=True)]


def taken(data, count):
    return list(itertools.islice(data, count))


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 9, 14])
def test_a_resumed_iteration_yields_the_remaining_batches(make, done):
    whole = taken(RepeatedPasses(Passes(make(), 1, "data")), 16)
    first = RepeatedPasses(Passes(make(), 1, "data"))
    taken(first, done)
    torch.rand(3)  # what the model does in between plays no part
    passes = Passes(make(), 1, "data")
    passes.first()
    second = RepeatedPasses(passes)
    if done:
        state = first.state_dict()
        second.load_state_dict(state)
    assert all(map(torch.equal, taken(second, 16 - done), whole[done:]))


@pytest.mark.parametrize("make", LOADERS)
def test_passes_differ_and_evaluations_do_not(make):
    length = len(list(make()))
    batches = taken(RepeatedPasses(Passes(make(), 1, "data")), 2 * length)
    assert not all(map(torch.equal, batches[:length], batches[length:]))
    evaluation = RepeatedPass(Passes(make(), 1, "data"))
    assert all(map(torch.equal, list(evaluation), list(evaluation)))


def test_the_first_pass_of_a_generator_is_unchanged():
    assert all(map(torch.equal, RepeatedPass(Passes(own_generator(), 1, "data")), own_generator()))


@given(st.integers(1, 12), st.integers(1, 12))
def test_parts_of_a_batch_add_up_to_it(samples, size):
    images = torch.arange(samples * 2).view(samples, 2)
    batch = {"input_ids": images, "more": (images + 1, [images * 2]), "scale": torch.tensor(3.0), "name": "x"}
    parts = list(split_batch(batch, size))
    assert [num_samples(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), images)
    assert torch.equal(torch.cat([part["more"][1][0] for part in parts]), images * 2)
    assert all(part["name"] == "x" and part["scale"] == 3 for part in parts)
    assert (num_tokens(batch), num_tokens(images)) == (2 * samples, 0)
    if samples % size:
        with pytest.raises(DataError, match="cannot be divided"):
            equal_part(batch, size)
    else:
        assert equal_part(batch, size) == samples // size


def test_metrics_are_found_wherever_they_are():
    inner = torchmetrics.MeanMetric()
    model = nn.Sequential(nn.Linear(2, 2), inner)
    named = AccuracyMetric(name="accuracy")
    owner = types.SimpleNamespace(
        model=model,
        again=inner,
        named=named,
        several=[AccuracyMetric(name="accuracy"), {"deep": torchmetrics.MaxMetric()}],
        other=3,
    )
    found = find_metrics(owner)
    assert found["model"] is inner and found["accuracy"] is named
    assert list(found) == ["model", "accuracy", "accuracy:2", "several"]
    inner.update(2.0)
    assert metric_values(found) == {"model": 2.0}, "what has seen no batch has nothing to say"


def test_a_metric_with_several_values():
    metric = torchmetrics.classification.MulticlassAccuracy(2, average=None)
    metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
    assert metric_values({"each": metric}) == {"each/0": 0.5, "each/1": 1.0}
