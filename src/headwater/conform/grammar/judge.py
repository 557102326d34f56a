"""Verdicts on a program: equal, refused, different or failed under each plan."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Sequence

import torch

from headwater.conform.grammar.execute import Failed, Ran, run_plain, run_streamed
from headwater.conform.grammar.program import KEPT, Program
from headwater.conform.plans import PLANS
from headwater.conform.record import Shown, first_difference
from headwater.plan.known_traces import KnownTraces


class Verdict(enum.StrEnum):
    """The result of comparing a streamed run with the plain one."""

    EQUAL = "equal"
    REFUSED = "refused"
    WARNED = "differs as a warning says"
    DIFFERS = "differs"
    FAILED = "failed"
    CRASHED = "crashed"
    CRASHED_PLAIN = "crashed in plain PyTorch"


BAD = frozenset({Verdict.DIFFERS, Verdict.FAILED, Verdict.CRASHED})
"""Verdicts that are faults."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict on a program under one plan.

    Attributes:
        verdict: the result of the comparison.
        plan: name of the plan.
        reason: the difference, the refusal or the error.
        cause: the part of the reason that must stay the same while the program is made smaller.
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


def judge(
    program: Program, plain: Ran, plans: Sequence[str], begin: Callable[[str], None] = lambda plan: None
) -> list[Finding]:
    """Return the verdict under each of these plans.

    Args:
        program: a model and its loop.
        plain: the program's plain run.
        plans: names of plans; the dry runs of the first one serve the others too.
        begin: called with each plan before the program is run under it.
    """
    traces = KnownTraces()
    findings = []
    for plan in plans:
        begin(plan)
        findings.append(_judge(program, plain, plan, traces))
    return findings


def _judge(program: Program, plain: Ran, plan: str, traces: KnownTraces) -> Finding:
    source = program.source()
    streamed = run_streamed(source, plan, traces)
    if isinstance(streamed, Failed):
        verdict = Verdict.REFUSED if streamed.refused else Verdict.FAILED
        return Finding(verdict, plan, str(streamed), f"{streamed.kind} {streamed.place}")
    difference = first_difference(plain.shown, streamed.shown)
    if difference is None:
        return Finding(Verdict.EQUAL, plan)
    if streamed.warning and first_difference(_without_kept(plain), _without_kept(streamed)) is None:
        return Finding(Verdict.WARNED, plan, streamed.warning)
    # Only after a difference: this second plain run is rarely needed, and takes as long as the first.
    again = run_plain(source)
    if isinstance(again, Failed) or first_difference(plain.shown, again.shown) is not None:
        return Finding(Verdict.EQUAL, plan, "plain PyTorch differs from itself")
    return Finding(Verdict.DIFFERS, plan, str(difference), "differs")


def _without_kept(ran: Ran) -> list[Shown]:
    """Return the values of a run, except those of tensors that share memory with weights; see `KEPT`."""
    return [(name, value) for name, value in ran.shown if not name.startswith(KEPT)]


def _finite(ran: Ran) -> bool:
    """True if all values of a run are finite."""
    tensors = (value for _, value in ran.shown if isinstance(value, torch.Tensor))
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
