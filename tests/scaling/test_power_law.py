"""The power law: known laws are found again, published losses are predicted, and poor data are refused."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from headwater.core.errors import DataError
from headwater.scaling.law import PowerLaw, Run, fit_power_law

CARD = {
    "111M": (2.6e18, 2.566),
    "256M": (1.3e19, 2.299),
    "590M": (6.1e19, 2.184),
    "1.3B": (2.8e20, 1.996),
    "2.7B": (1.1e21, 1.834),
    "6.7B": (6.3e21, 1.704),
    "13B": (2.3e22, 1.575),
}
"""Training FLOPs and cross-entropy on the Pile's test set, from the model card of Cerebras-GPT."""


def runs_of(law, compute, scatter=()):
    off = scatter if len(scatter) else np.zeros(len(compute))
    return [Run(f"r{i}", c, law.loss(c) + o) for i, (c, o) in enumerate(zip(compute, off, strict=True))]


@pytest.mark.parametrize(("irreducible", "exponent"), [(1.7, 0.05), (0.0, 0.076), (2.5, 0.3), (0.5, 1.1)])
def test_exact_losses_give_their_law(irreducible, exponent):
    law = PowerLaw(irreducible, 1.3, exponent, 1e15)
    fit = fit_power_law(runs_of(law, np.geomspace(1e13, 1e17, 6)))
    assert fit.law.irreducible == pytest.approx(irreducible, abs=1e-5)
    assert fit.law.exponent == pytest.approx(exponent, rel=1e-5)
    assert fit.predict(1e18).value == pytest.approx(law.loss(1e18), rel=1e-6)
    assert fit.exponent.high - fit.exponent.low < 1e-4


def test_fit_is_that_of_scipy():
    compute, losses = np.array(list(CARD.values())).T
    fit = fit_power_law([Run(name, *numbers) for name, numbers in CARD.items()])

    def law(c, irreducible, scale, exponent):
        return irreducible + scale * (c / 1e20) ** -exponent

    (irreducible, _, exponent), _ = curve_fit(law, compute, losses, p0=(0.5, 1.5, 0.07))
    assert fit.law.irreducible == pytest.approx(irreducible, abs=1e-4)
    assert fit.law.exponent == pytest.approx(exponent, rel=1e-4)


def test_six_published_losses_predict_the_seventh():
    *first, (_, (compute, loss)) = CARD.items()
    fit = fit_power_law([Run(name, *numbers) for name, numbers in first])
    predicted = fit.predict(compute)
    assert predicted.value == pytest.approx(loss, rel=0.02)
    assert predicted.low < loss < predicted.high
    assert 0.05 < fit.law.exponent < 0.1 and 0.2 < fit.law.irreducible < 0.8


def test_intervals_contain_most_new_runs():
    law, random = PowerLaw(1.7, 1.0, 0.15, 1e15), np.random.default_rng(0)
    compute, target, hits = np.geomspace(1e13, 1e17, 8), 4e17, 0
    for seed in range(40):
        fit = fit_power_law(runs_of(law, compute, random.normal(0, 0.01, 8)), seed)
        predicted = fit.predict(target)
        hits += predicted.low < law.loss(target) + random.normal(0, 0.01) < predicted.high
    assert hits >= 30


def test_order_of_runs_does_not_matter():
    runs = [Run(name, *numbers) for name, numbers in CARD.items()]
    assert fit_power_law(runs) == fit_power_law(runs[::-1])


def error_of(runs):
    with pytest.raises(DataError) as caught:
        fit_power_law(runs)
    assert caught.value.remedy
    return str(caught.value)


def test_too_few_runs_are_refused():
    runs = [Run(name, *numbers) for name, numbers in CARD.items()]
    assert "at least 4 runs" in error_of(runs[:3]) and "got 0" in error_of([])


def test_two_runs_of_equal_compute_are_refused():
    runs = [Run(name, *numbers) for name, numbers in CARD.items()]
    assert "got 111M and again" in error_of([*runs, Run("again", 2.6e18, 2.5)])


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, -1.0])
def test_losses_that_are_not_numbers_are_refused(loss):
    runs = [Run(name, *numbers) for name, numbers in CARD.items()]
    assert "broken" in error_of([*runs, Run("broken", 1e23, loss)])


@pytest.mark.parametrize(
    "losses",
    [
        [2.0, 2.1, 2.2, 2.3, 2.4],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        [3.0, 2.0, 2.0, 2.0, 2.0],
        [2.0, 2.0, 2.0, 2.0, 1.0],
        [2.3, 2.1, 2.4, 2.2, 2.3],
    ],
    ids=["rising", "constant", "step at the start", "step at the end", "scatter"],
)
def test_losses_without_a_law_are_refused(losses):
    runs = [
        Run(f"r{i}", c, loss) for i, (c, loss) in enumerate(zip(np.geomspace(1, 1e4, 5), losses, strict=True))
    ]
    assert "do not determine" in error_of(runs)
