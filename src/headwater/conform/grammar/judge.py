"""Verdicts on a program: equal, refused, different or failed under each plan."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence

import torch

from headwater.conform.grammar.execute import Failed, Ran, run_plain, run_streamed
from headwater.conform.grammar.program import Program
from headwater.conform.plans import PLANS
from headwater.conform.record import first_difference


class Verdict(enum.StrEnum):
    """The result of comparing a streamed run with the plain one."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERS = "differs"
    FAILED = "failed"
    CRASHED = "crashed"


BAD = frozenset({Verdict.DIFFERS, Verdict.FAILED, Verdict.CRASHED})
"""Verdicts that are faults."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict on a program under one plan.

    Attributes:
        verdict: how the runs compare.
        plan: name of the plan.
        reason: the difference, the refusal or the error.
        cause: what remains the same while the program is made smaller.
    """

    verdict: Verdict
    plan: str
    reason: str = ""
    cause: str = ""


def draw_plans(seed: int, case: int) -> tuple[str, ...]:
    """Return the two plans of a case."""
    return tuple(random.Random(f"{seed} {case} plans").sample(list(PLANS), 2))


def usable(program: Program) -> Ran | None:
    """Return the plain run of a program; `None` if PyTorch refuses it, or it is not equal to itself."""
    first = run_plain(program.source())
    if isinstance(first, Failed) or not _finite(first):
        return None
    return first


def judge(program: Program, plain: Ran, plans: Sequence[str]) -> list[Finding]:
    """Return the verdict under each of these plans."""
    return [_judge(program, plain, plan) for plan in plans]


def _judge(program: Program, plain: Ran, plan: str) -> Finding:
    source = program.source()
    streamed = run_streamed(source, plan)
    if isinstance(streamed, Failed):
        verdict = Verdict.REFUSED if streamed.refused else Verdict.FAILED
        return Finding(verdict, plan, str(streamed), f"{streamed.kind} {streamed.place}")
    difference = first_difference(plain.shown, streamed.shown)
    if difference is None:
        return Finding(Verdict.EQUAL, plan)
    again = run_plain(source)
    if isinstance(again, Failed) or first_difference(plain.shown, again.shown) is not None:
        return Finding(Verdict.EQUAL, plan, "plain PyTorch differs from itself")
    return Finding(Verdict.DIFFERS, plan, str(difference), "differs")


def _finite(ran: Ran) -> bool:
    """True if all values of a run are finite."""
    tensors = (value for _, value in ran.shown if isinstance(value, torch.Tensor))
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
