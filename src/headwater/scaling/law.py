"""The power law of the loss over compute: L(C) = irreducible + scale · (C / reference)^-exponent.

This is the form of Henighan et al. (arXiv:2010.14701, equation 1.1).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import DataError

MIN_RUNS = 4
"""Fewest runs of a fit: the law has three parameters, and one more run tests it."""

LEVEL = 0.9
"""Probability of the intervals."""

_RESAMPLES = 1000
_MOST_UNDETERMINED = 0.1
"""Largest share of resamples without a fit; with more, the data do not determine the law."""
_EXPONENTS = np.geomspace(1e-3, 4.0, 200)
_SAME_COMPUTE = 1e-3
"""Relative difference of compute below which two runs count as equal."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_REFINEMENTS = 60

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        name: its name, for tables and errors.
        compute: FLOPs of its training.
        loss: its loss at the end of the training, in nats per token.
    """

    name: str
    compute: float
    loss: float


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """A power law with an irreducible term.

    Attributes:
        irreducible: loss with unlimited compute.
        scale: loss at `reference` above the irreducible loss.
        exponent: exponent of compute, positive.
        reference: compute at which `scale` applies, in FLOPs.
    """

    irreducible: float
    scale: float
    exponent: float
    reference: float

    def loss(self, compute: float) -> float:
        """Return the loss after training with `compute` FLOPs."""
        return self.irreducible + self.scale * float((compute / self.reference) ** -self.exponent)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its bootstrap interval.

    Attributes:
        value: the number.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law fitted to runs.

    Attributes:
        law: the law.
        runs: the runs, by increasing compute.
        resampled: laws fitted to bootstrap resamples.
        residuals: of the runs, corrected for the number of parameters.
        seed: seed of the resamples.
    """

    law: PowerLaw
    runs: tuple[Run, ...]
    resampled: tuple[PowerLaw, ...]
    residuals: tuple[float, ...]
    seed: int

    @property
    def exponent(self) -> Estimate:
        """The exponent, with its interval."""
        return _estimate(self.law.exponent, [law.exponent for law in self.resampled])

    @property
    def irreducible(self) -> Estimate:
        """The irreducible loss, with its interval."""
        return _estimate(self.law.irreducible, [law.irreducible for law in self.resampled])

    def predict(self, compute: float) -> Estimate:
        """Return the loss of a run with `compute` FLOPs. The interval includes the scatter of single runs."""
        scatter = np.random.default_rng(self.seed).choice(self.residuals, len(self.resampled))
        losses = [law.loss(compute) + off for law, off in zip(self.resampled, scatter, strict=True)]
        return _estimate(self.law.loss(compute), losses)


def fit_power_law(runs: Sequence[Run], seed: int = 0) -> Fit:
    """Fit the law to runs by least squares of the loss, and refit it to bootstrap resamples of the residuals.

    For each exponent the other two parameters follow from linear regression, with an irreducible loss of at
    least zero. The exponent is searched on a grid and refined. Nothing depends on initial values.

    Args:
        runs: at least `MIN_RUNS`, in any order.
        seed: seed of the resamples.

    Raises:
        DataError: if there are too few runs, two have equal compute, a number is not positive and finite, or
            the data do not determine the law.
    """
    ordered = tuple(sorted(runs, key=lambda run: run.compute))
    _check(ordered)
    compute = np.array([run.compute for run in ordered])
    losses = np.array([run.loss for run in ordered])
    reference = float(np.exp(np.log(compute).mean()))
    distance = np.log(compute / reference)
    (law,) = _laws(distance, losses[None], reference)
    if law is None:
        raise _undetermined(ordered, _why(distance, losses))
    fitted = np.array([law.loss(each) for each in compute])
    residuals = (losses - fitted) * math.sqrt(len(runs) / (len(runs) - 3))
    residuals -= residuals.mean()
    drawn = np.random.default_rng(seed).choice(residuals, (_RESAMPLES, len(runs)))
    resampled = [found for found in _laws(distance, fitted + drawn, reference) if found is not None]
    missing = 1 - len(resampled) / _RESAMPLES
    if missing > _MOST_UNDETERMINED:
        why = f"{missing:.0%} of {_RESAMPLES} resamples of the scatter have no law"
        raise _undetermined(ordered, why)
    return Fit(law, ordered, tuple(resampled), tuple(residuals.tolist()), seed)


def _check(runs: Sequence[Run]) -> None:
    for run in runs:
        if not all(math.isfinite(number) and number > 0 for number in (run.compute, run.loss)):
            raise DataError(
                f"expected positive, finite numbers, got compute {run.compute:g} and loss {run.loss:g}",
                where=run.name,
                remedy="leave this run out, or train it again with a lower learning rate",
            )
    if len(runs) < MIN_RUNS:
        names = ", ".join(run.name for run in runs) or "none"
        raise DataError(
            f"expected at least {MIN_RUNS} runs to fit a law of three parameters, got {len(runs)}: {names}",
            remedy="train further sizes",
        )
    for first, second in itertools.pairwise(runs):
        if second.compute / first.compute - 1 < _SAME_COMPUTE:
            raise DataError(
                f"expected runs of different compute, got {first.name} and {second.name} with "
                f"{first.compute:.4g} and {second.compute:.4g} FLOPs",
                remedy="leave one of them out, or change its size or its number of tokens",
            )


def _why(distance: Array, losses: Array) -> str:
    if np.polyfit(distance, losses, 1)[0] >= 0:
        return "the loss does not fall with compute"
    return "the loss falls too abruptly or too slowly for a power law"


def _undetermined(runs: Sequence[Run], why: str) -> DataError:
    shown = ", ".join(f"{run.name} {run.loss:.4f}" for run in runs)
    return DataError(
        f"the losses do not determine a power law: {why}",
        where=f"losses by compute: {shown}",
        remedy="train sizes over a wider range of compute, check their learning rates, or leave out a run "
        "that went wrong",
    )


def _laws(distance: Array, losses: Array, reference: float) -> list[PowerLaw | None]:
    """Return the law that fits each row of losses best; `None` if no law fits a row.

    Args:
        distance: log(compute / reference), [runs].
        losses: [rows, runs].
        reference: the reference compute, in FLOPs.
    """
    tried = np.stack([_regress(distance, losses, np.full(len(losses), each))[2] for each in _EXPONENTS])
    best = tried.argmin(axis=0)
    inside = (best > 0) & (best < len(_EXPONENTS) - 1)
    near = best.clip(1, len(_EXPONENTS) - 2)
    exponents = _refined(distance, losses, _EXPONENTS[near - 1], _EXPONENTS[near + 1])
    irreducible, scale, _ = _regress(distance, losses, exponents)
    return [
        PowerLaw(float(floor), float(factor), float(exponent), reference) if valid and factor > 0 else None
        for floor, factor, exponent, valid in zip(irreducible, scale, exponents, inside, strict=True)
    ]


def _refined(distance: Array, losses: Array, low: Array, high: Array) -> Array:
    """Return the exponent of least error between `low` and `high` for each row, by golden-section search."""
    for _ in range(_REFINEMENTS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        keep_left = _regress(distance, losses, left)[2] < _regress(distance, losses, right)[2]
        low, high = np.where(keep_left, low, left), np.where(keep_left, right, high)
    return (low + high) / 2


def _regress(distance: Array, losses: Array, exponents: Array) -> tuple[Array, Array, Array]:
    """Return irreducible loss, scale and squared error of each row, for an exponent for each row."""
    falling = np.exp(-exponents[:, None] * distance)
    mean, centered = losses.mean(axis=1), falling - falling.mean(axis=1, keepdims=True)
    scale = (centered * losses).sum(axis=1) / (centered**2).sum(axis=1)
    irreducible = mean - scale * falling.mean(axis=1)
    # Least squares with an irreducible loss of zero, where the regression gives a negative one.
    alone = (falling * losses).sum(axis=1) / (falling**2).sum(axis=1)
    scale, irreducible = np.where(irreducible < 0, alone, scale), irreducible.clip(0)
    errors = losses - irreducible[:, None] - scale[:, None] * falling
    return irreducible, scale, (errors**2).sum(axis=1)


def _estimate(value: float, samples: Sequence[float]) -> Estimate:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
