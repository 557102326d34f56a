"""One random model of a campaign: drawn, judged, and made smaller if it has a fault."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from headwater.conform.grammar.draw import draw
from headwater.conform.grammar.execute import Ran
from headwater.conform.grammar.judge import BAD, Finding, Verdict, draw_plans, judge, usable
from headwater.conform.grammar.program import Program
from headwater.conform.grammar.shrink import shrink
from headwater.conform.grammar.standalone import standalone
from headwater.core.precision import PrecisionName

PLAIN = "plain"
"""Name that stands for plain PyTorch among the plans of a case."""

_MOST_DRAWS = 50


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one random program: its findings, and the smallest program of each fault.

    Attributes:
        case: number of the case.
        findings: one finding for each plan.
        features: the features of the drawn program.
        smallest: for each fault, the features of the smallest program that has it.
        scripts: for each fault, a script that reproduces it.
        version: the versions of Headwater and torch that were compared; empty if they are unknown.
    """

    case: int
    findings: tuple[Finding, ...]
    features: tuple[str, ...]
    smallest: tuple[tuple[str, ...], ...] = ()
    scripts: tuple[str, ...] = ()
    version: str = ""

    def faults(self) -> list[Finding]:
        """Return the findings that are faults."""
        return [finding for finding in self.findings if finding.verdict in BAD]

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Return the outcome from the values that `to_json` returned."""
        findings = tuple(
            Finding(Verdict(each["verdict"]), each["plan"], each["reason"], each["cause"])
            for each in data["findings"]
        )
        smallest = tuple(tuple(features) for features in data["smallest"])
        scripts, version = tuple(data["scripts"]), data.get("version", "")  # missing in older files
        return cls(data["case"], findings, tuple(data["features"]), smallest, scripts, version)


@dataclasses.dataclass(frozen=True)
class Part:
    """One run of a program under a plan. It is reported before it begins, because it may crash the process.

    Attributes:
        case: number of the case.
        plan: name of the plan, or `PLAIN`.
        features: the features of the program.
        script: a script that reproduces the run.
    """

    case: int
    plan: str
    features: tuple[str, ...]
    script: str

    def crashed(self, reason: str) -> Outcome:
        """Return the outcome of a case whose process ended during this part."""
        if self.plan == PLAIN:
            crash = Finding(Verdict.CRASHED_PLAIN, self.plan, reason, reason)
            return Outcome(self.case, (crash,), self.features)
        finding = Finding(Verdict.CRASHED, self.plan, reason, reason)
        return Outcome(self.case, (finding,), self.features, (self.features,), (self.script,))


Listener = Callable[[Part], None]
"""Function that is called with each part of a case before the part begins."""


def run_case(
    seed: int,
    case: int,
    *,
    precision: PrecisionName = "fp32",
    shrinks: bool = True,
    begin: Listener = lambda part: None,
) -> Outcome:
    """Draw, judge and, if it has a fault, shrink one case.

    Args:
        seed: seed of the campaign.
        case: number of the case.
        precision: precision of the forwards.
        shrinks: true to make programs with faults smaller.
        begin: called before each part of the work.
    """
    program, plain = _draw_usable(seed, case, precision, begin)
    plans = draw_plans(seed, case)
    findings = judge(program, plain, plans, lambda plan: _report_part(begin, case, plan, program))
    smallest: list[tuple[str, ...]] = []
    scripts: list[str] = []
    for index, (plan, finding) in enumerate(zip(plans, findings, strict=True)):
        if finding.verdict not in BAD:
            continue
        small = program
        if shrinks:
            small, findings[index] = shrink(
                program, finding, functools.partial(_report_part, begin, case, plan)
            )
        smallest.append(small.features())
        scripts.append(standalone(small, plan))
    return Outcome(case, tuple(findings), program.features(), tuple(smallest), tuple(scripts))


def _report_part(begin: Listener, case: int, plan: str, program: Program) -> None:
    """Report that a program is about to be run under a plan."""
    begin(Part(case, plan, program.features(), standalone(program, plan)))


def _draw_usable(seed: int, case: int, precision: PrecisionName, begin: Listener) -> tuple[Program, Ran]:
    """Return the first program of a case that plain PyTorch trains, and its plain run."""
    for attempt in range(_MOST_DRAWS):
        program = draw(seed, case, attempt, precision=precision)
        begin(Part(case, PLAIN, program.features(), program.source()))
        plain = usable(program)
        if plain is not None:
            return program, plain
    raise AssertionError(f"none of {_MOST_DRAWS} drawn programs runs in plain PyTorch")
