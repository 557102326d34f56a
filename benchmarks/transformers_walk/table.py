"""The page of the documentation with the outcome of each class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import transformers

from benchmarks.transformers_walk.walk import Outcome


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes of all classes as Markdown."""
    return "\n".join(_lines(outcomes)) + "\n"


def _lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    built = [outcome for outcome in outcomes if outcome.built]
    equal = [outcome for outcome in built if outcome.equal]
    yield "# The transformers library, class by class"
    yield ""
    yield "`python -m benchmarks.transformers_walk --page docs/transformers.md` goes through the auto-model"
    yield f"mappings of the transformers library ({transformers.__version__}). It builds every class in a"
    yield "tiny random configuration if possible, and trains it for three steps in fp32, in plain PyTorch and"
    yield "streamed with the fewest slabs. It compares losses, gradient norms and weights bit for bit, and"
    yield "writes this page."
    yield ""
    yield f"Of {len(outcomes)} classes {len(built)} could be built; **{len(equal)} of these are equal**."
    yield ""
    yield from _by_task(outcomes)
    yield from _named("Not equal", "what happened", (o for o in built if not o.equal))
    yield "## Not built"
    yield ""
    yield "Plain PyTorch does not train these classes either. Most often the reduced configuration"
    yield "has invalid sizes, or a package is not installed."
    yield ""
    yield from _named("", "why", (o for o in outcomes if not o.built))


def _by_task(outcomes: Sequence[Outcome]) -> Iterator[str]:
    tasks: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        tasks[outcome.entry.tasks[0]].append(outcome)
    yield "| task | classes | built | equal |"
    yield "|---|---:|---:|---:|"
    for task, members in sorted(tasks.items(), key=lambda item: -len(item[1])):
        built = sum(outcome.built for outcome in members)
        yield f"| {task} | {len(members)} | {built} | {sum(bool(outcome.equal) for outcome in members)} |"
    yield ""


def _named(title: str, column: str, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Return a list of names and reasons, or an empty one."""
    rows = [f"| `{outcome.entry.class_name}` | {_cell(outcome.reason)} |" for outcome in outcomes]
    if not rows:
        return
    if title:
        yield f"## {title}"
        yield ""
    yield f"| class | {column} |"
    yield "|---|---|"
    yield from rows
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]
