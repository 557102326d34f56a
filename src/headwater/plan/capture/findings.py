"""Findings: operators that a graph cannot hold, or holds in part, and their places in the user's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from headwater.plan.capture.place import Place, module_text

WHOLE_FORWARD = "forward"
"""The `operator` of a finding that no single operator has caused."""

_SHOWN_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operator that a graph cannot hold, or holds in part. Training is not affected.

    Attributes:
        operator: its name.
        problem: why a graph cannot hold it.
        captured: True if there is a graph, which lacks a part.
        place: the place where it was found first.
        modules: qualified names of all modules that use it in this line; `None`: outside the model.
    """

    operator: str
    problem: str
    captured: bool
    place: Place
    modules: tuple[str | None, ...]

    def __str__(self) -> str:
        state = "incomplete graph" if self.captured else "no graph"
        if len(self.modules) > _SHOWN_NAMES:
            where = f"modules {names_text(self.modules)} ({len(self.modules)})"
        else:
            where = names_text([module_text(module) for module in self.modules])
        line = f"{self.place.file}:{self.place.line}"
        return f"{state}: {self.operator}: {self.problem}\n  where: {where}\n  line: {line}"


class Findings:
    """Findings, one for each operator and line.

    Args:
        found: earlier findings.
    """

    def __init__(self, found: Iterable[Finding] = ()) -> None:
        self._found = {(each.operator, each.place.file, each.place.line): each for each in found}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def add(
        self,
        operator: str,
        problem: str,
        place: Place,
        modules: Iterable[str | None],
        *,
        captured: bool = True,
    ) -> None:
        """Add a finding. A finding of the same operator in the same line is extended."""
        key = operator, place.file, place.line
        before = self._found.get(key)
        if before is not None:
            problem = before.problem if problem in before.problem else f"{before.problem}; {problem}"
            captured, place, modules = captured and before.captured, before.place, (*before.modules, *modules)
        self._found[key] = Finding(operator, problem, captured, place, tuple(dict.fromkeys(modules)))

    def add_failure(self, problem: str, place: Place, modules: Iterable[str], *, captured: bool) -> None:
        """Add a failure in a line of code: to this line's findings, or as a finding of the whole forward."""
        line = place.file, place.line
        # An operator that was found in this line is most likely the cause of the failure.
        known = [each.operator for each in self if (each.place.file, each.place.line) == line]
        for operator in known or [WHOLE_FORWARD]:
            self.add(operator, problem, place, modules, captured=captured)


def names_text(names: Sequence[str | None]) -> str:
    """Return names of modules, stages or parameters in one text: `blocks.0 … blocks.95`."""
    shown = [name or "(model)" for name in names]
    return ", ".join(shown) if len(shown) <= _SHOWN_NAMES else f"{shown[0]} … {shown[-1]}"
