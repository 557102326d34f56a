"""Phrases that a reader has to decode stay out of docstrings, comments, errors, names of tests and pages.

`RULES` lists the phrases with a better form of each. They apply everywhere. `ALLOWED` lists places where a
phrase is right. CONTRIBUTING.md has the rules behind this list.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = {
    r"whoever": "name the rank, thread or caller",
    r"who (?:waits|asks|looks|reads|uses|sees|saves|holds|stops|needs|wants|comes|has|writes|takes)": (
        "name the rank, thread or caller; a process is 'it'"
    ),
    r"of (?:which|whom)": "two sentences",
    r"(?<!there\s)(?:is|are|was|were|be) (?-i:none)": "'there is no …', 'without …'",
    r"one's own": "'the user's', 'separate'",
    r"of (?:its|their|his) own(?! [a-z])": "'separate', 'its'",
    r"(?:has|have|had) not got": "'lacks'",
    r"anew": "'again'",
    r"in place of": "'instead of'",
    r"so many": "name the number",
    r"as often as": "name the number",
    r"(?:hear|hears|heard) of": "'learn', 'notice'",
    r"(?:goes|go|went|going|gone) on": "'continues'",
    r"comes? to the same": "'is equal'",
    r"(?:that|than|as|what|where) there (?:is|are|was|were)": "name the thing",
    r"(?:thereof|therein|hitherto)": "a word of today",
    r"nobody": "'no rank', 'no process'",
}
FIRST_WORDS = r"(?:What|Whether|Let|Say|Says|Within it|Where|Be|How|Who|Of|By what|From what|Out of|That)\b"
ALLOWED = {
    ("CONTRIBUTING.md", "is none"),  # examples of what not to write
    ("CONTRIBUTING.md", "goes on"),
    ("CONTRIBUTING.md", "so many"),
    ("CONTRIBUTING.md", "anew"),
    ("CONTRIBUTING.md", "as there are"),
    ("src/headwater/fabric/secret.py", "nobody"),  # no person
}
"""(file, phrase in lower case): places where the phrase is right."""

Prose = tuple[int, str, bool]
"""A line number, the text that starts there, and whether it is a docstring."""


def separated(pattern: str) -> str:
    """Return a pattern that also matches where its words are on two lines or in two string literals."""
    return rf"\b(?:{pattern})\b".replace(" ", r"(?:[\s\"'#])+")


PHRASES = {re.compile(separated(pattern), re.IGNORECASE): better for pattern, better in RULES.items()}
ANY_PHRASE = re.compile("|".join(separated(pattern) for pattern in RULES), re.IGNORECASE)
ANY_OPENING = re.compile(rf'"""{FIRST_WORDS}')


def prose_of_python(text: str) -> Iterator[Prose]:
    """Yield docstrings, texts of errors, names of tests, and blocks of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node, clean=False)
            if documented:
                yield node.body[0].lineno, documented, True
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.lineno, node.name.replace("_", " "), False
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value, False
    yield from _comments(text)


def _comments(text: str) -> Iterator[Prose]:
    start, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != start + len(lines):
                yield start, "\n".join(lines), False
                lines = []
            start = start if lines else token.start[0]
            lines.append(token.string)
    if lines:
        yield start, "\n".join(lines), False


def prose_of_page(text: str) -> Iterator[Prose]:
    """Yield the paragraphs of a Markdown page without code."""
    without = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
    line = 1
    for block in without.split("\n\n"):
        yield line, re.sub(r"`[^`]*`", "x", block), False
        line += block.count("\n") + 2


def faults(path: str, text: str) -> Iterator[str]:
    """Yield a line on each phrase of `RULES`, and on each docstring with a bad first word."""
    # Parsing is slow, so texts without the phrases are skipped. Names of tests have `_` between words.
    if not ANY_PHRASE.search(text.replace("_", " ")) and not ANY_OPENING.search(text):
        return
    if path.endswith(".py"):
        found = prose_of_python(text)
    else:
        found = prose_of_page(text) if path.endswith(".md") else _script_comments(text)
    for start, prose, is_docstring in found:
        if is_docstring and re.match(FIRST_WORDS, prose):
            yield f"{path}:{start}: a docstring starts with {prose.split()[0]!r}; better a verb or a noun"
        for phrase, better in PHRASES.items():
            for match in phrase.finditer(prose):
                words = " ".join(match[0].lower().split())
                if (path, words) not in ALLOWED:
                    line = start + prose[: match.start()].count("\n")
                    yield f"{path}:{line}: {words!r}; better {better}"


def _script_comments(text: str) -> Iterator[Prose]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield number, line, False


@cache
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    suffixes = ("", ".py", ".md")
    return [
        name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in suffixes and (ROOT / name).is_file()
    ]


def is_checked(name: str) -> bool:
    return name != Path(__file__).relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", ["", "benchmarks", "docs", "scripts", "src", "tests"])
def test_no_phrase_that_has_to_be_decoded(folder):
    names = [name for name in tracked() if is_checked(name)]
    names = [name for name in names if name.startswith(f"{folder}/") or (not folder and "/" not in name)]
    assert names, f"{folder} has no files"
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    found = [fault for name, text in texts.items() for fault in faults(name, text)]
    assert not found, "\n".join(["", *found])


def test_every_allowed_place_still_has_its_phrase():
    for name, phrase in ALLOWED:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(separated(re.escape(phrase).replace(r"\ ", " ")), text, re.IGNORECASE), (
            name,
            phrase,
        )


def test_phrases_are_found_in_prose_and_not_in_code():
    module = '"""A slab, made\nanew."""\n\nanew = "anew"  # goes\n# on\n'
    assert [each.split(":")[1] for each in faults("a.py", module)] == ["2", "4"]
    error = 'def test_it_goes_on():\n    """Whether it is."""\n    raise E("there is "\n"one, of " "which")\n'
    assert len(list(faults("a.py", error))) == 3
    page = "A page\n\n`anew`\n\n```\nanew\n```\n\nA rank that\ngoes on.\n"
    assert [each.split(":")[1] for each in faults("a.md", page)] == ["10"]
    assert not list(faults("a.md", "A goes-on.\n"))
