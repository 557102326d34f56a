"""Campaigns: thousands of random models, with a folder that records their outcomes."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.conform.grammar.case import Outcome
from headwater.conform.grammar.judge import BAD, Verdict
from headwater.conform.grammar.workers import run_cases
from headwater.core.errors import ConfigError
from headwater.core.files import check_place, disk_errors, make_folder, why_unreadable
from headwater.core.precision import PrecisionName
from headwater.fabric.consistency import program

_CASES, _CAMPAIGN, _PROGRAMS = "cases.jsonl", "campaign.json", "programs"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Faults that probably have one cause: they have the same verdict and the same `cause` text.

    Attributes:
        verdict: the verdict of its findings.
        cause: the place and kind of an error, or the features of the smallest program that differs.
        cases: the numbers of the cases that have this fault.
        reason: the reason in the first of these cases.
        script: the shortest script that reproduces the fault.
    """

    verdict: Verdict
    cause: str
    cases: tuple[int, ...]
    reason: str
    script: str


class Folder:
    """The folder in which a campaign records its outcomes.

    Args:
        path: path of the folder; it is created if it is missing.
        seed: seed of the campaign.
        precision: precision of its forwards.

    Raises:
        ConfigError: if the folder belongs to a campaign with another seed or precision, or is damaged.
        RunError: if a file has the path of the folder, or the folder cannot be written.
    """

    def __init__(self, path: Path, seed: int, precision: PrecisionName = "fp32") -> None:
        self.path = path
        check_place(path, expected="a folder")
        about = path / _CAMPAIGN
        with disk_errors(path):
            make_folder(path / _PROGRAMS)
            if not about.exists():
                about.write_text(json.dumps({"seed": seed, "precision": precision}))
            text = about.read_text(errors="replace")
        with _parsing(about):
            content = json.loads(text)
            found = content["seed"], content.get("precision", "fp32")  # older folders name no precision
        if found != (seed, precision):
            raise ConfigError(
                f"expected a folder of models of seed {seed} in {precision}, found models of seed "
                f"{found[0]} in {found[1]}",
                where=str(path),
                remedy=f"pass another folder (--out), or --seed {found[0]} --precision {found[1]}",
            )

    def outcomes(self) -> list[Outcome]:
        """Return the last outcome of each case so far, and remove an incomplete last line from the file."""
        file = self.path / _CASES
        if not file.exists():
            return []
        with disk_errors(file):
            text = file.read_text(errors="replace")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                file.write_text(whole)
        with _parsing(file):
            outcomes = [Outcome.from_json(json.loads(line)) for line in whole.splitlines()]
        return list({outcome.case: outcome for outcome in outcomes}.values())

    def add(self, outcome: Outcome) -> None:
        """Append an outcome, and write the scripts of its faults."""
        with disk_errors(self.path):
            for number, script in enumerate(outcome.scripts):
                (self.path / _PROGRAMS / f"case_{outcome.case}_{number}.py").write_text(script)
            # After the scripts: a case counts as done once its line is complete. Its scripts must exist then.
            with (self.path / _CASES).open("a") as file:
                file.write(json.dumps(outcome.to_json()) + "\n")


@contextmanager
def _parsing(file: Path) -> Iterator[None]:
    """Enter a context in which wrong content of a campaign's file is a `ConfigError`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the file is not that of a campaign, or it is damaged: {why_unreadable(error)}",
            where=str(file),
            remedy="pass another folder (--out), or a copy of this one",
        ) from error


def run_campaign(
    seed: int,
    count: int,
    *,
    workers: int,
    limit_s: float,
    precision: PrecisionName = "fp32",
    folder: Folder | None = None,
    shrinks: bool = True,
    progress: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Run the first `count` cases of a seed and return their outcomes by number.

    A case whose outcome is in the folder is not run again, unless another version of Headwater or torch was
    compared and was not equal: the fault may have been fixed.

    Args:
        seed: seed of the campaign.
        count: number of cases.
        workers: number of processes at a time.
        limit_s: seconds for each run of a case.
        precision: precision of the forwards.
        folder: folder of the campaign.
        shrinks: true to make programs with faults smaller.
        progress: called with all outcomes after each case.
    """
    version = ", ".join(program().values())
    known = folder.outcomes() if folder else []
    before = {outcome.case: outcome for outcome in known if outcome.version == version or _is_equal(outcome)}
    outcomes = [outcome for case, outcome in before.items() if case < count]
    todo = [case for case in range(count) if case not in before]
    for outcome in run_cases(
        seed, todo, workers=workers, limit_s=limit_s, precision=precision, shrinks=shrinks
    ):
        outcome = dataclasses.replace(outcome, version=version)
        if folder is not None:
            folder.add(outcome)
        outcomes.append(outcome)
        progress(outcomes)
    return sorted(outcomes, key=lambda outcome: outcome.case)


def _is_equal(outcome: Outcome) -> bool:
    """True if every comparison of a case was equal."""
    return all(finding.verdict is Verdict.EQUAL for finding in outcome.findings)


def faults(outcomes: Iterable[Outcome]) -> list[Fault]:
    """Group the faults of outcomes by cause, and return the causes, the most frequent first."""
    groups: dict[tuple[Verdict, str], list[tuple[int, str, str]]] = collections.defaultdict(list)
    for outcome in outcomes:
        bad = outcome.faults()
        for finding, smallest, script in zip(bad, outcome.smallest, outcome.scripts, strict=True):
            cause = finding.cause
            if finding.verdict is Verdict.DIFFERS:
                cause = " + ".join(smallest) or "the bare program"
            groups[finding.verdict, cause].append((outcome.case, finding.reason, script))
    found = [
        Fault(
            verdict,
            cause,
            tuple(case for case, _, _ in entries),
            entries[0][1],
            min((script for _, _, script in entries), key=len),
        )
        for (verdict, cause), entries in groups.items()
    ]
    return sorted(found, key=lambda fault: -len(fault.cases))


def counts(outcomes: Iterable[Outcome]) -> dict[Verdict, int]:
    """Return the number of comparisons by verdict."""
    found = collections.Counter(finding.verdict for outcome in outcomes for finding in outcome.findings)
    return {verdict: found[verdict] for verdict in Verdict}


def is_clean(outcomes: Iterable[Outcome]) -> bool:
    """True if no comparison has a fault."""
    return not any(finding.verdict in BAD for outcome in outcomes for finding in outcome.findings)
