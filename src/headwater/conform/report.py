"""The outcome of a comparison, as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from headwater.core.units import counted

EQUAL, CLOSE, DIFFERS, UNSTEADY = "equal", "within tolerance", "differs", "differs from itself"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The result of one run: whether it equals the plain run, and where it differs.

    Attributes:
        run: name of the plan, or of the plain run.
        outcome: one of the four outcomes of this module, or the status of a run that failed.
        detail: the difference, or the message.
        values: number of values that were compared.
        trace: the traceback, if the error is not one of the project's exceptions.
    """

    run: str
    outcome: str
    detail: str = ""
    values: int = 0
    trace: str = ""

    @property
    def passed(self) -> bool:
        """True if the run is equal to the plain one."""
        return self.outcome in (EQUAL, CLOSE)


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a comparison.

    Attributes:
        target: the model.
        steps: number of training steps.
        seed: seed of initial values and random numbers.
        precision: precision of the forwards.
        parameters: number of elements of the model's parameters.
        versions: name -> version of Python and of the packages that were used.
        entries: one entry for each run, the plain run first.
    """

    target: str
    steps: int
    seed: int
    precision: str
    parameters: int
    versions: dict[str, str]
    entries: tuple[Entry, ...]

    @property
    def passed(self) -> bool:
        """True if every run is equal to the plain one."""
        return bool(self.entries) and all(entry.passed for entry in self.entries)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if self.passed:
            number = counted(len(self.entries) - 1, "plan computes", "plans compute")
            return f"equal: {number} what plain PyTorch computes"
        plain, *plans = self.entries
        if not plain.passed:
            return f"not compared: the plain run {plain.outcome}"
        counts = [
            f"{sum(entry.outcome == outcome for entry in plans)} {outcome}"
            for outcome in dict.fromkeys(entry.outcome for entry in plans)
        ]
        return f"not equal under every plan: {', '.join(counts)}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"verdict": self.verdict, "equal": self.passed, **dataclasses.asdict(self)}

    def render(self) -> str:
        """Return the report as lines of text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"model    {self.target} ({self.parameters:,} parameters)",
            f"compared {counted(self.steps, 'step', 'steps')} in {self.precision}, seed {self.seed}: "
            "losses, outputs, gradients, parameters, buffers, optimizer state",
            f"versions {versions}",
            "",
        ]
        width = max(len(entry.run) for entry in self.entries)
        for entry in self.entries:
            count = f"{entry.values:,} values" if entry.passed and entry.values else ""
            line = f"{entry.run:{width}}  {entry.outcome}"
            first, *more = entry.detail.splitlines() or [""]
            lines.append(": ".join(filter(None, [line, first or count])))
            lines += [textwrap.indent(text.strip(), " " * (width + 4)) for text in more]
            if entry.trace:
                lines.append(textwrap.indent(entry.trace.rstrip(), " " * (width + 4)))
        return "\n".join([*lines, "", self.verdict])
