"""Schedules against both forms of those of torch.optim.lr_scheduler, and against plain formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedulers

from headwater.core.errors import ConfigError
from headwater.optim import Constant, CosineDecay, Linear, Sequential
from headwater.optim.schedules import (
    Chained,
    CosineAnnealing,
    CosineAnnealingWarmRestarts,
    Cyclic,
    Exponential,
    InverseExponentialTimeDecay,
    InverseSquareRootDecay,
    Lambda,
    Multiplicative,
    MultiStep,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    Step,
)

RATES = st.floats(1e-6, 1.0)
FACTORS = st.floats(0.1, 1.0)
LENGTHS = st.integers(1, 40)
MILESTONES = st.lists(st.integers(0, 40), max_size=5).map(sorted)


def holds_for(**strategies):
    return lambda test: settings(deadline=None, max_examples=40)(given(**strategies)(test))


def attached(make, base):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    return optimizer, make(optimizer)


def torch_values(make, base, steps):
    """Learning rates that a scheduler of torch sets at steps 0, 1, …"""
    optimizer, scheduler = attached(make, base)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def torch_closed(make, base, steps):
    """Learning rates of the closed form of a scheduler of torch."""
    _, scheduler = attached(make, base)
    values = []
    for step in range(steps):
        scheduler.last_epoch = step
        values.append(scheduler._get_closed_form_lr()[0])
    return values


def ours(schedule, steps):
    return [schedule.value(step) for step in range(steps)]


def assert_equal(schedule, expected, rel=1e-12):
    """Equal to `rel`, where rounding is relative to the largest value: differences of two rates cancel."""
    assert ours(schedule, len(expected)) == pytest.approx(expected, rel=rel, abs=rel * max(expected))


def bound(scheduler, **arguments):
    return lambda optimizer: scheduler(optimizer, **arguments)


@holds_for(end=RATES, start=RATES, length=LENGTHS)
def test_linear(end, start, length):
    low, high = sorted((start, end))  # torch takes factors in (0, 1] of the higher rate
    make = bound(torch_schedulers.LinearLR, start_factor=low / high, end_factor=1.0, total_iters=length)
    assert_equal(Linear(low, high, length), torch_closed(make, high, length + 5))
    assert_equal(Linear(low, high, length), torch_values(make, high, length + 5), rel=1e-9)


@holds_for(initial=RATES, length=LENGTHS, power=st.floats(0.5, 3.0))
def test_polynomial(initial, length, power):
    make = bound(torch_schedulers.PolynomialLR, total_iters=length, power=power)
    assert_equal(Polynomial(initial, 0.0, length, power), torch_closed(make, initial, length + 5))


@holds_for(initial=RATES, end=RATES, length=st.integers(0, 40), step=st.integers(0, 100))
def test_linear_is_the_polynomial_of_power_one(initial, end, length, step):
    for cycle in (False, True):
        line = Linear(initial, end, length, cycle)
        polynomial = Polynomial(initial, end, length, 1.0, cycle)
        assert line.value(step) == pytest.approx(polynomial.value(step), rel=1e-12)


def test_a_cycle_is_a_longer_decay_each_time():
    values = ours(Polynomial(1.0, 0.0, 4, cycle=True), 13)
    assert values[:5] == [1, 0.75, 0.5, 0.25, 0]
    assert values[5:9] == pytest.approx([1 - step / 8 for step in (5, 6, 7, 8)])
    assert values[9:] == pytest.approx([1 - step / 12 for step in (9, 10, 11, 12)])


@holds_for(initial=RATES, end=RATES, period=LENGTHS)
def test_cosine(initial, end, period):
    make = bound(torch_schedulers.CosineAnnealingLR, T_max=period, eta_min=end)
    annealing = CosineAnnealing(initial, period, end)
    assert_equal(annealing, torch_closed(make, initial, 3 * period + 1))
    # torch computes each value from the one before, so its rounding errors add up
    assert_equal(annealing, torch_values(make, initial, period + 1), rel=1e-6)
    assert_equal(CosineDecay(initial, end, period), ours(annealing, period + 1))


@holds_for(initial=RATES, end=RATES, first=st.integers(1, 9), times=st.integers(1, 3))
def test_warm_restarts(initial, end, first, times):
    make = bound(torch_schedulers.CosineAnnealingWarmRestarts, T_0=first, T_mult=times, eta_min=end)
    schedule = CosineAnnealingWarmRestarts(initial, first, times, end)
    assert_equal(schedule, torch_values(make, initial, 60))


@holds_for(initial=RATES, rate=FACTORS)
def test_exponential(initial, rate):
    make = bound(torch_schedulers.ExponentialLR, gamma=rate)
    assert_equal(Exponential(initial, 1, rate), torch_closed(make, initial, 40))
    assert_equal(Multiplicative(initial, rate), torch_closed(make, initial, 40))
    multiplicative = bound(torch_schedulers.MultiplicativeLR, lr_lambda=lambda step: rate)
    assert_equal(Multiplicative(initial, rate), torch_values(multiplicative, initial, 40))


@holds_for(initial=RATES, rate=FACTORS, length=LENGTHS)
def test_exponential_with_staircase_equals_step(initial, rate, length):
    make = bound(torch_schedulers.StepLR, step_size=length, gamma=rate)
    expected = torch_closed(make, initial, 90)
    assert_equal(Step(initial, length, rate), expected)
    assert_equal(Exponential(initial, length, rate, staircase=True), expected)
    assert Exponential(initial, length, rate).value(length) == pytest.approx(initial * rate)


@holds_for(initial=RATES, rate=FACTORS, milestones=MILESTONES)
def test_multi_step(initial, rate, milestones):
    make = bound(torch_schedulers.MultiStepLR, milestones=milestones, gamma=rate)
    schedule = MultiStep(initial, rate, tuple(milestones))
    assert_equal(schedule, torch_closed(make, initial, 45))
    levels = tuple(initial * rate**passed for passed in range(len(milestones) + 1))
    assert_equal(PiecewiseConstant(levels, tuple(milestones)), ours(schedule, 45))


@holds_for(initial=RATES)
def test_lambda(initial):
    make = bound(torch_schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    assert_equal(Lambda(initial, lambda step: 1 / (1 + step)), torch_values(make, initial, 20))


@holds_for(
    lower=RATES,
    upper=RATES,
    up=st.integers(1, 9),
    down=st.none() | st.integers(1, 9),
    mode=st.sampled_from(["triangular", "triangular2", "exp_range"]),
    gamma=FACTORS,
)
def test_cyclic(lower, upper, up, down, mode, gamma):
    make = bound(
        torch_schedulers.CyclicLR, base_lr=lower, max_lr=upper, step_size_up=up, step_size_down=down,
        mode=mode, gamma=gamma, cycle_momentum=False,
    )  # fmt: skip
    expected = torch_values(make, lower, 60)
    # torch finds its place in the cycle by subtracting numbers that grow with the step
    assert_equal(Cyclic(lower, upper, up, down, mode, gamma), expected, rel=1e-10 * max(1, upper / lower))


@holds_for(
    peak=RATES,
    total=st.integers(5, 60),
    share=st.floats(0.25, 0.45),
    three=st.booleans(),
    strategy=st.sampled_from(["cos", "linear"]),
)
def test_one_cycle(peak, total, share, three, strategy):
    make = bound(
        torch_schedulers.OneCycleLR, max_lr=peak, total_steps=total, pct_start=share, three_phase=three,
        anneal_strategy=strategy, div_factor=20.0, final_div_factor=100.0, cycle_momentum=False,
    )  # fmt: skip
    schedule = OneCycle(peak / 20.0, peak, total, share, 100.0, three, strategy)
    _, scheduler = attached(make, 1.0)
    expected = [scheduler.get_last_lr()[0]]
    for _ in range(total - 1):
        scheduler.optimizer.step()
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    assert_equal(schedule, expected)
    assert schedule.value(total + 7) == schedule.value(total - 1)


def test_one_cycle_of_a_single_step():
    assert OneCycle(0.1, 1.0, 1).value(0) == pytest.approx(0.1 / 1e4)


@holds_for(initial=RATES, rate=RATES, length=LENGTHS, exponent=st.floats(0.5, 2.0), step=st.integers(0, 200))
def test_inverse_exponential_time_decay(initial, rate, length, exponent, step):
    plain = InverseExponentialTimeDecay(initial, exponent, length, rate)
    stairs = InverseExponentialTimeDecay(initial, exponent, length, rate, staircase=True)
    assert plain.value(step) == pytest.approx(initial / (1 + rate * step**exponent / length), rel=1e-12)
    assert stairs.value(step) == pytest.approx(
        initial / (1 + rate * math.floor(step**exponent / length)), rel=1e-12
    )


@holds_for(initial=RATES, scale=RATES, warm=LENGTHS, step=st.integers(0, 200))
def test_inverse_square_root_decay(initial, scale, warm, step):
    value = InverseSquareRootDecay(initial, scale, warm).value(step)
    assert value == pytest.approx(scale * initial * max(step, warm) ** -0.5, rel=1e-12)


@holds_for(initial=RATES, end=RATES, length=LENGTHS, later=st.integers(0, 100))
def test_ramps_hold_their_end(initial, end, length, later):
    for kind in (Linear, CosineDecay, Polynomial):
        schedule = kind(initial, end, length)
        assert schedule.value(0) == pytest.approx(initial, rel=1e-12)
        assert schedule.value(length + later) == end
        assert schedule.length == length
        assert all(
            min(initial, end) * (1 - 1e-9) <= value <= max(initial, end) * (1 + 1e-9)
            for value in ours(schedule, length)
        )


@holds_for(warm=st.integers(1, 10), decay=st.integers(1, 20), rest=st.integers(0, 5))
def test_sequential_equals_torch(warm, decay, rest):
    def make(optimizer):
        parts = [
            torch_schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=warm),
            torch_schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=decay),
        ]
        return torch_schedulers.SequentialLR(optimizer, parts, milestones=[warm])

    parts = (Linear(0.1, 1.0, warm), Linear(1.0, 0.2, decay))
    steps = warm + decay + rest
    assert Sequential.of(parts) == Sequential(parts, (warm,))
    assert Sequential.of(parts).length == warm + decay
    assert_equal(Sequential.of(parts), torch_values(make, 1.0, steps), rel=1e-9)


@holds_for(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), step=st.integers(0, 60))
def test_sequential_counts_steps_of_each_part_from_zero(lengths, step):
    milestones = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    parts = tuple(Linear(i, i + 0.5, 10) for i in range(len(lengths) + 1))
    value = Sequential(parts, milestones).value(step)
    index = int(value)
    start = milestones[index - 1] if index else 0
    assert start <= step
    assert index == len(milestones) or step < milestones[index]
    assert value == parts[index].value(step - start)


@holds_for(initial=RATES, rate=FACTORS, milestone=LENGTHS)
def test_chained_equals_torch(initial, rate, milestone):
    def make(optimizer):
        return torch_schedulers.ChainedScheduler(
            [
                torch_schedulers.ExponentialLR(optimizer, gamma=rate),
                torch_schedulers.MultiStepLR(optimizer, milestones=[milestone], gamma=0.5),
            ]
        )

    chain = Chained((Exponential(initial, 1, rate), MultiStep(3.0, 0.5, (milestone,))))
    assert_equal(chain, torch_values(make, initial, 45))


def test_warm_up_of_no_steps_is_skipped():
    assert Sequential((Linear(0.0, 1.0, 0), Constant(0.5)), (0,)).value(0) == 0.5
    assert Linear(0.0, 1.0, 0).value(0) == 1.0


def test_cosine_halfway():
    assert CosineDecay(1.0, 0.0, 4).value(2) == pytest.approx(0.5)
    assert CosineDecay(1.0, 0.0, 3).value(1) == pytest.approx((1 + math.cos(math.pi / 3)) / 2)


def test_schedules_are_values():
    assert Linear(0.0, 1.0, 5) == Linear(0.0, 1.0, 5)
    assert Constant(1.0) != Constant(2.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiStep(1.0, 0.1, (5, 3)), "ascending order"),
        (
            lambda: PiecewiseConstant((1.0, 2.0), (1, 2)),
            "expected one milestone fewer than the 2 parts, got 2 milestones",
        ),
        (
            lambda: Sequential((Constant(1.0), Constant(2.0)), ()),
            "one milestone fewer than the 2 parts, got 0",
        ),
        (lambda: Sequential.of((Constant(1.0), Constant(2.0))), "Constant has no end"),
        (lambda: Chained((Constant(1.0), Linear(0.0, 1.0, 5))), "Linear starts at 0"),
        (lambda: Chained(()), "at least one schedule"),
        (lambda: Cyclic(0.1, 1.0, mode="exp_range", scale_mode="cycle"), "with mode 'exp_range'"),
    ],
)
def test_invalid_schedules_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
