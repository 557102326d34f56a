"""Training of one architecture in plain PyTorch and under every plan, in this process."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import headwater
from benchmarks.architectures.catalogue import Architecture
from headwater.conform.plans import PLANS, with_enough_slabs
from headwater.conform.record import Shown, first_difference
from headwater.conform.report import DIFFERS, EQUAL, UNSTEADY
from headwater.conform.subject import Subject, seed_all, subject_of
from headwater.conform.train import Course, train
from headwater.core.errors import HeadwaterError

_COURSE = Course(steps=3, seed=0, observed=True)
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one architecture.

    Attributes:
        name: the name of the architecture.
        family: the group of architectures that lists it.
        parameters: number of elements of its parameters.
        outcomes: by plan, `equal` or another outcome of a report.
        reasons: by plan, why it is not equal.
    """

    name: str
    family: str
    parameters: int
    outcomes: dict[str, str]
    reasons: dict[str, str]

    @property
    def equal(self) -> bool:
        """True if it is equal under every compared plan."""
        return set(self.outcomes.values()) == {EQUAL}


def compare(architecture: Architecture, plans: Sequence[str] = tuple(PLANS)) -> Row:
    """Return the outcome of an architecture under these plans."""
    torch.set_num_threads(1)
    subject = _made(architecture)
    count = sum(parameter.numel() for parameter in subject.model.parameters())
    row = Row(architecture.name, architecture.family, count, {}, {})
    try:
        plain = train(subject, _COURSE, lambda model: model)
        again = train(_made(architecture), _COURSE, lambda model: model)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        row.outcomes["plain"], row.reasons["plain"] = "failed", _one_line(error)
        return row
    difference = first_difference(plain, again)
    if difference is not None:
        row.outcomes["plain"], row.reasons["plain"] = UNSTEADY, str(difference)
        return row
    for plan in plans:
        row.outcomes[plan] = EQUAL
        try:
            difference = first_difference(plain, _streamed(architecture, plan))
            if difference is not None:
                row.outcomes[plan], row.reasons[plan] = DIFFERS, str(difference)
        except HeadwaterError as error:
            row.outcomes[plan], row.reasons[plan] = "refused", error.what
        except Exception as error:  # noqa: BLE001 - any other error is an outcome
            row.outcomes[plan] = "failed"
            row.reasons[plan] = _one_line(error)
    return row


def _one_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _streamed(architecture: Architecture, plan: str) -> list[Shown]:
    def run(options: Mapping[str, Any]) -> list[Shown]:
        backend = headwater.backend("CSX", **options)
        subject = _made(architecture)
        try:
            return train(subject, _COURSE, lambda model: headwater.compile(model, backend))
        finally:
            headwater.release(subject.model)

    with tempfile.TemporaryDirectory() as folder:
        return with_enough_slabs(plan, Path(folder), run)


def _made(architecture: Architecture) -> Subject:
    """Return the subject with its initial values."""
    seed_all(_SEED)
    return subject_of(architecture.make())
