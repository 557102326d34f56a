"""Schedules of sparsity equal their formulas at chosen steps, and cadences start at the right steps."""

import pytest

from headwater.sparsity.schedules import Cadence, Constant, Cosine, Cubic, Exponential, Linear, Power


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Constant(0.3), {0: 0.3, 100: 0.3}),
        (Linear(0.5, 0.01), {0: 0.5, 10: 0.6}),
        (Exponential(0.2, gamma=0.1), {0: 0.2, 10: 1 - 0.8 * 0.36787944}),
        (Exponential(0.2, gamma=10.0, final=0.9), {100: 0.9}),
        (Power(0.8, 0.5), {0: 0.8, 3: 0.1}),
        (Cosine(0.4, half_period=10), {0: 0.4, 5: 0.2, 10: 0.0, 20: 0.4}),
        (Cosine(0.4, half_period=10, minimum=0.2), {5: 0.3, 10: 0.2}),
        (Cubic(0.0, 0.8, begin=10, end=20), {0: 0.0, 10: 0.0, 15: 0.7, 20: 0.8, 90: 0.8}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_a_schedule_has_the_values_of_its_formula(schedule, values):
    assert {step: schedule(step) for step in values} == pytest.approx(values)


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [
        (Cadence(4), [4, 8, 12]),
        (Cadence(4, start=5), [8, 12]),
        (Cadence(4, start=8, stop=12), [8]),
        (Cadence(1, start=11), [11, 12, 13]),
    ],
    ids=str,
)
def test_a_cadence_includes_its_multiples_from_start_to_stop(cadence, steps):
    assert [step for step in range(14) if cadence.includes(step)] == steps
