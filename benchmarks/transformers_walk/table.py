"""The page of the documentation with the outcome of each class."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import transformers

from benchmarks.transformers_walk.walk import Outcome

_LONGEST = 240
"""Characters of a reason."""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes of all classes as Markdown."""
    return "\n".join(_lines(outcomes)) + "\n"


def _lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    built = [outcome for outcome in outcomes if outcome.built]
    equal = [outcome for outcome in built if outcome.equal]
    yield "# The transformers library, class by class"
    yield ""
    yield "`python -m benchmarks.transformers_walk --page docs/transformers.md` tests all model classes that"
    yield f"the auto classes of the transformers library ({transformers.__version__}) can load. It makes a"
    yield "tiny model of each class with random weights, and trains it for three steps in fp32: in plain"
    yield "PyTorch, and streamed with the fewest slabs. It compares losses, gradient norms, weights and"
    yield "buffers bit for bit, and writes this page."
    yield ""
    yield f"Of {len(outcomes)} classes {len(built)} could be built; **{len(equal)} of these are equal**."
    yield "A class with several tasks is counted in one of them."
    yield ""
    yield from _by_task(outcomes)
    yield from _named("Not equal", "what happened", (o for o in built if not o.equal))
    yield "## Not built"
    yield ""
    yield "For these classes the benchmark found no tiny model that plain PyTorch can train, or a package is"
    yield 'not installed. After "no inputs found" is the error of the first inputs that were tried.'
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
    """Return a reason without advice on how to install a package. A long reason is cut after a word."""
    text = re.sub(r"(?<=\.) (?:You can|Please) install it.*", "", text)
    if len(text) > _LONGEST:
        text = text[: _LONGEST + 1].rpartition(" ")[0] + " …"
    return text.replace("|", "\\|")
