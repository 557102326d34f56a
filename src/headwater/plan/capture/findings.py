"""What a graph cannot hold, or holds in part, and where in the user's code it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from headwater.plan.capture.place import Place, module_text

WHOLE_FORWARD = "forward"
"""In place of an operator, where none is known to be the reason."""

_SHOWN_NAMES = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a graph cannot hold, or holds in part; training does not mind.

    Attributes:
        operator: what it is.
        problem: why.
        captured: whether there is a graph all the same.
        place: where it was met first.
        modules: qualified names of all modules that use it in this line; `None`: outside the model.
    """

    operator: str
    problem: str
    captured: bool
    place: Place
    modules: tuple[str | None, ...]

    def __str__(self) -> str:
        state = "in a graph in part" if self.captured else "in no graph"
        if len(self.modules) > _SHOWN_NAMES:
            where = f"modules {names_text(self.modules)} ({len(self.modules)})"
        else:
            where = names_text([module_text(module) for module in self.modules])
        line = f"{self.place.file}:{self.place.line}"
        return f"{state}: {self.operator}: {self.problem}\n  where: {where}\n  line: {line}"


class Findings:
    """Findings, one for each operator and line.

    Args:
        found: those there are already.
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
        """Note a finding; what was found in the same line before is completed."""
        key = operator, place.file, place.line
        before = self._found.get(key)
        if before is not None:
            problem = before.problem if problem in before.problem else f"{before.problem}; {problem}"
            captured, place, modules = captured and before.captured, before.place, (*before.modules, *modules)
        self._found[key] = Finding(operator, problem, captured, place, tuple(dict.fromkeys(modules)))

    def add_failure(self, problem: str, place: Place, modules: Iterable[str], *, captured: bool) -> None:
        """Note what failed in a line; operators that were found there before are the reason."""
        line = place.file, place.line
        known = [each.operator for each in self if (each.place.file, each.place.line) == line]
        for operator in known or [WHOLE_FORWARD]:
            self.add(operator, problem, place, modules, captured=captured)


def names_text(names: Sequence[str | None]) -> str:
    """Names of modules, stages or parameters in one: `blocks.0 … blocks.95`."""
    shown = [name or "(model)" for name in names]
    return ", ".join(shown) if len(shown) <= _SHOWN_NAMES else f"{shown[0]} … {shown[-1]}"
