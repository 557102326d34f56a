"""Schedules against torch.optim.lr_scheduler, step by step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.optim import Constant, CosineDecay, Linear, Sequential

RATES = st.floats(1e-6, 1.0)
LENGTHS = st.integers(1, 40)


def torch_values(make, base, steps):
    """Learning rates that a scheduler of torch sets at steps 0, 1, …"""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = make(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def ours(schedule, steps):
    return [schedule.value(step) for step in range(steps)]


@given(end=RATES, start=RATES, length=LENGTHS)
def test_linear_equals_torch(end, start, length):
    low, high = sorted((start, end))  # torch takes factors in (0, 1] of the higher rate

    def make(optimizer):
        return torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=low / high, end_factor=1.0, total_iters=length
        )

    expected = torch_values(make, high, length + 5)
    assert ours(Linear(low, high, length), length + 5) == pytest.approx(expected, rel=1e-9)


@given(initial=RATES, end=RATES, length=LENGTHS)
def test_cosine_equals_torch_in_its_first_period(initial, end, length):
    def make(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length, eta_min=end)

    expected = torch_values(make, initial, length + 1)
    # torch computes each value from the one before, so its rounding errors add up
    assert ours(CosineDecay(initial, end, length), length + 1) == pytest.approx(expected, rel=1e-6)


@given(initial=RATES, end=RATES, length=LENGTHS, later=st.integers(0, 100))
def test_ramps_hold_their_end(initial, end, length, later):
    for schedule in (Linear(initial, end, length), CosineDecay(initial, end, length)):
        assert schedule.value(0) == pytest.approx(initial, rel=1e-12)
        assert schedule.value(length + later) == end
        assert all(
            min(initial, end) * (1 - 1e-9) <= value <= max(initial, end) * (1 + 1e-9)
            for value in ours(schedule, length)
        )


@given(warm=st.integers(1, 10), decay=st.integers(1, 20), rest=st.integers(0, 5))
def test_sequential_equals_torch(warm, decay, rest):
    schedulers = torch.optim.lr_scheduler

    def make(optimizer):
        parts = [
            schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=warm),
            schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=decay),
        ]
        return schedulers.SequentialLR(optimizer, parts, milestones=[warm])

    schedule = Sequential((Linear(0.1, 1.0, warm), Linear(1.0, 0.2, decay)), (warm,))
    steps = warm + decay + rest
    assert ours(schedule, steps) == pytest.approx(torch_values(make, 1.0, steps), rel=1e-9)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), step=st.integers(0, 60))
def test_sequential_gives_each_part_its_own_step(lengths, step):
    milestones = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    parts = tuple(Linear(i, i + 0.5, 10) for i in range(len(lengths) + 1))
    value = Sequential(parts, milestones).value(step)
    index = int(value)
    start = milestones[index - 1] if index else 0
    assert start <= step
    assert index == len(milestones) or step < milestones[index]
    assert value == parts[index].value(step - start)


def test_warm_up_of_no_steps_is_skipped():
    assert Sequential((Linear(0.0, 1.0, 0), Constant(0.5)), (0,)).value(0) == 0.5
    assert Linear(0.0, 1.0, 0).value(0) == 1.0


def test_cosine_halfway():
    assert CosineDecay(1.0, 0.0, 4).value(2) == pytest.approx(0.5)
    assert CosineDecay(1.0, 0.0, 3).value(1) == pytest.approx((1 + math.cos(math.pi / 3)) / 2)


def test_schedules_are_values():
    assert Linear(0.0, 1.0, 5) == Linear(0.0, 1.0, 5)
    assert Constant(1.0) != Constant(2.0)
