"""Search for a smaller program that still shows a fault."""

from __future__ import annotations

from collections.abc import Callable

from headwater.conform.grammar.judge import Finding, Verdict, judge, usable
from headwater.conform.grammar.program import Program

_MOST_TRIES = 300


def shrink(
    program: Program, finding: Finding, begin: Callable[[Program], None] = lambda program: None
) -> tuple[Program, Finding]:
    """Return the smallest program found that has the same fault under the same plan, and its finding.

    Args:
        program: a program with a fault.
        finding: the fault.
        begin: called with each program before it is tried.
    """
    tries = 0
    smaller = True
    while smaller and tries < _MOST_TRIES:
        smaller = False
        for candidate in program.simpler():
            tries += 1
            begin(candidate)
            found = _same_fault(candidate, finding)
            if found is not None:
                program, finding, smaller = candidate, found, True
                break
            if tries >= _MOST_TRIES:
                break
    return program, finding


def _same_fault(program: Program, finding: Finding) -> Finding | None:
    """Return the finding of a program if it is the same fault, or `None`."""
    plain = usable(program)
    if plain is None:
        return None
    (found,) = judge(program, plain, [finding.plan])
    same = found.verdict is finding.verdict and (
        found.verdict is Verdict.DIFFERS or found.cause == finding.cause
    )
    return found if same else None
