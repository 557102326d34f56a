"""Tasks that ask a model for programs: problems in the forms of HumanEval and MBPP, from local files.

Prompts, stop words and tests are those of bigcode-evaluation-harness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headwater.core.errors import ConfigError, DataError
from headwater.core.names import nearest
from headwater.data.raw_records import BadRecords, Record, checked_text, read_records

_SUFFIXES = (".jsonl", ".jsonl.gz")
_UNSTRIPPED = "-unstripped"
"""End of the name of a task whose prompts keep their white space."""
_HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")
_MBPP_STOPS = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```")
_MBPP_TEST_IDS = range(11, 511)
"""The `task_id` of the test problems of MBPP (arXiv:2108.07732, section 2.1)."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem.

    Attributes:
        prompt: the text that the model continues.
        reference: the tests; an error in them is a program that has failed.
        solution: a program that passes; `None` if the file lacks it.
    """

    prompt: str
    reference: str
    solution: str | None


@dataclasses.dataclass(frozen=True)
class ProgramTask:
    """A task.

    Attributes:
        name: its name.
        problems: its problems; at least one.
        stop_words: a program ends before the first of these.
    """

    name: str
    problems: tuple[Problem, ...]
    stop_words: tuple[str, ...]

    def cut(self, text: str) -> str:
        """Return the part of a generated text before the first stop word."""
        places = (text.find(word) for word in self.stop_words)
        return text[: min((place for place in places if place >= 0), default=len(text))]


def load_problems(
    names: Sequence[str], folder: Path | None, first: int = 0, limit: int | None = None
) -> list[ProgramTask]:
    """Load tasks with their problems.

    Args:
        names: names of tasks, or paths of .jsonl files. `NAME-unstripped` is `NAME` with the white space
            around its prompts.
        folder: folder with the files NAME.jsonl or NAME.jsonl.gz, in any case; or such a file.
        first: number of problems to leave out before the first one.
        limit: most problems of a task.

    Raises:
        ConfigError: if a task has no file.
        DataError: if a file cannot be read, or has problems of neither form.
    """
    found = []
    for name in names:
        path = Path(name)
        given = path.is_file()
        base = (_stem(path) if given else name).removesuffix(_UNSTRIPPED)
        file = path if given else _file(base, folder)
        task = _task(_stem(path) if given else name, base, file, strip=not name.endswith(_UNSTRIPPED))
        last = None if limit is None else first + limit
        chosen = task.problems[first:last]
        if not chosen:
            raise DataError(
                f"no problem is left: limit_start is {first}, and there are {len(task.problems)} problems",
                where=str(file),
                remedy="use a smaller limit_start",
            )
        found.append(dataclasses.replace(task, problems=chosen))
    return found


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _file(name: str, folder: Path | None) -> Path:
    """Return the file of a task.

    Raises:
        ConfigError: if the file does not exist.
    """
    if folder is not None and folder.is_file():
        return folder
    files = [] if folder is None or not folder.is_dir() else [p for p in folder.iterdir() if _is_data(p)]
    for path in sorted(files):
        if _stem(path).lower() == name.lower():
            return path
    if folder is None:
        problem, remedy = f"the task {name} has no file", "name the folder of NAME.jsonl with include_path"
    else:
        near = nearest(name, map(_stem, files))
        problem = f"expected {name}.jsonl in the folder of tasks, found {len(files)} other .jsonl files"
        remedy = (
            f"write {near}"
            if near
            else "name a folder with files NAME.jsonl, or such a file, as include_path"
        )
    raise ConfigError(problem, where="tasks" if folder is None else str(folder), remedy=remedy)


def _is_data(path: Path) -> bool:
    return path.name.lower().endswith(_SUFFIXES) and path.is_file()


def _task(name: str, base: str, file: Path, *, strip: bool) -> ProgramTask:
    """Read a file of problems. Its first record tells its form."""
    records = list(read_records([file], BadRecords()))
    fields = records[0].fields if records else {}
    stops: tuple[str, ...]
    read: Callable[[Record], Problem]
    if "entry_point" in fields:
        stops, read = _HUMANEVAL_STOPS, lambda record: _humaneval(record, strip=strip)
    elif "test_list" in fields:
        stops, read = _MBPP_STOPS, _mbpp
        if base.lower() == "mbpp":
            records = [each for each in records if each.fields.get("task_id") in _MBPP_TEST_IDS]
    else:
        keys = ", ".join(sorted(fields)) or "nothing"
        raise DataError(
            f"expected problems in the form of HumanEval or MBPP, found {keys}",
            where=str(file),
            remedy="give each line prompt, test and entry_point, or text and test_list",
        )
    return ProgramTask(name, tuple(map(read, records)), stops)


def _humaneval(record: Record, *, strip: bool) -> Problem:
    prompt, test, entry = _texts(record, "prompt", "test", "entry_point")
    solution = None
    if "canonical_solution" in record.fields:
        solution = prompt + next(_texts(record, "canonical_solution"))
    return Problem(prompt.strip() if strip else prompt, f"\n{test}\ncheck({entry})", solution)


def _mbpp(record: Record) -> Problem:
    # The name of the text in the file of MBPP, and in its sanitized version.
    text = next(_texts(record, "text" if "text" in record.fields else "prompt"))
    tests = record.fields.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError(
            "expected a list of tests at 'test_list'",
            where=record.where,
            remedy='write, for example, "test_list": ["assert f(1) == 2"]',
        )
    solution = next(_texts(record, "code")) if "code" in record.fields else None
    return Problem(f'"""\n{text}\n{tests[0]}\n"""\n', "\n".join(tests), solution)


def _texts(record: Record, *keys: str) -> Iterator[str]:
    """Yield the texts at some keys of a problem.

    Raises:
        DataError: if the problem lacks one of them.
    """
    for key in keys:
        if key not in record.fields:
            raise DataError(
                f"the problem has no {key!r}",
                where=record.where,
                remedy="give each line prompt, test and entry_point, or text and test_list",
            )
        yield checked_text(record.fields[key], key, record.where)
