"""Evaluation on tasks that ask a model for programs: writing them, running them, and the results."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, final

from headwater.config.bigcode import BigCodeArguments
from headwater.core.errors import DataError
from headwater.core.files import check_place, disk_errors, replace_file, why_unreadable
from headwater.core.patience import notice_if_long, print_notice
from headwater.core.seeding import derive_seed
from headwater.core.units import counted
from headwater.data.codec import Codec
from headwater.evaluation.pass_rates import pass_rates
from headwater.evaluation.problems import ProgramTask, load_problems
from headwater.evaluation.sandbox import Outcome, ProgramLimits, Sandbox
from headwater.evaluation.scorer import Prompt, Scorer
from headwater.generation.sampling import Sampling

Programs = list[list[str]]
"""The programs of a task: for each problem a list with its prompt and what a model has written after it."""
RESULTS_FILE = "evaluation_results.json"


@dataclasses.dataclass(frozen=True)
class ProgramFiles:
    """The files of an evaluation.

    Attributes:
        folder: folder of paths that are relative.
        arguments: the arguments, which have the paths.
        step: training steps so far, which the names of files include.
    """

    folder: Path
    arguments: BigCodeArguments
    step: int | None = None

    def check(self) -> None:
        """Raise if the files cannot be written.

        Raises:
            RunError: if something else lies there, or this user may not write there.
        """
        arguments = self.arguments
        for name in (arguments.save_generations_path, arguments.save_references_path, self._results):
            check_place((self.folder / name).parent, expected="a folder")

    def of_programs(self, tasks: Sequence[ProgramTask]) -> str:
        """Return the files of the programs, with commas between them."""
        path = self.arguments.save_generations_path
        return ", ".join(str(self._named(path, task.name)) for task in tasks)

    def save_programs(self, task: ProgramTask, programs: Programs, *, complete: bool = True) -> None:
        """Write the programs of a task, as a list for each problem."""
        if self.arguments.save_generations or not complete:
            ending = "" if complete else "_intermediate"
            self._write(self._named(self.arguments.save_generations_path, task.name, ending), programs)

    def save_references(self, task: ProgramTask) -> None:
        """Write the tests of a task, as a text for each problem."""
        if self.arguments.save_references:
            tests = [problem.reference for problem in task.problems]
            self._write(self._named(self.arguments.save_references_path, task.name), tests)

    def save_results(self, results: dict[str, Any]) -> Path:
        """Write the results, and return their file."""
        return self._write(self._named(self._results), results)

    @property
    def _results(self) -> str:
        return self.arguments.metric_output_path or RESULTS_FILE

    def _named(self, path: str, task: str | None = None, ending: str = "") -> Path:
        """Return a path with the task and the step in its name."""
        full = self.folder / path
        words = [
            full.stem,
            *([] if task is None else [task]),
            *([] if self.step is None else [str(self.step)]),
        ]
        return full.with_name("_".join(words) + ending + ".json")

    def _write(self, path: Path, value: object) -> Path:
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=1).encode())
        return path


@final
class ProgramWriter:
    """Writes programs with a model.

    Args:
        scorer: computes.
        codec: the tokenizer.
        arguments: the arguments of the evaluation.
    """

    def __init__(self, scorer: Scorer, codec: Codec, arguments: BigCodeArguments) -> None:
        self._scorer = scorer
        self._codec = codec
        self._arguments = arguments

    def write(self, task: ProgramTask, first: int, last: int) -> Programs:
        """Return programs for the problems of a task from `first` to before `last`.

        All programs are written at once: each pass over the weights computes the next token of as many as
        fit into memory.

        Raises:
            DataError: if the tokenizer does not fit the model.
        """
        prompts = {number: self._prompts(task, number) for number in range(first, last)}
        short = sum(not each for each in prompts.values())
        if short:
            print_notice(
                f"{counted(short, 'prompt', 'prompts')} of {task.name} left unanswered: longer than "
                "max_length_generation or the positions of the model"
            )
        flat = [prompt for each in prompts.values() for prompt in each]
        found = iter(self._scorer.continuations(flat, self._codec.ends, self._stop(task)))
        return [
            [self._program(task, number, prompt, next(found)) for prompt in each]
            # Without room for an answer, the program is the prompt, as in the harness.
            or [task.problems[number].prompt] * self._arguments.n_samples
            for number, each in prompts.items()
        ]

    def _prompts(self, task: ProgramTask, number: int) -> list[Prompt]:
        """Return a prompt for each program of a problem; none if there is no room for an answer."""
        arguments = self._arguments
        tokens = self._codec.encode(arguments.prefix + task.problems[number].prompt)
        room = self._scorer.max_length - len(tokens) + 1
        new_tokens = min(room, arguments.max_tokens or arguments.max_length_generation - len(tokens))
        if new_tokens < 1:
            return []
        place = arguments.limit_start + number
        return [
            Prompt(tokens, new_tokens, self._sampling(derive_seed(arguments.seed, task.name, place, sample)))
            for sample in range(arguments.n_samples)
        ]

    def _sampling(self, seed: int) -> Sampling:
        arguments = self._arguments
        temperature = arguments.temperature if arguments.do_sample else 0.0
        return Sampling(temperature, arguments.top_k or None, arguments.top_p, seed)

    def _stop(self, task: ProgramTask) -> Callable[[list[int]], bool]:
        if not self._arguments.postprocess:
            return lambda tokens: False

        def stopped(tokens: list[int]) -> bool:
            text = self._codec.decode(tokens)
            return any(word in text for word in task.stop_words)

        return stopped

    def _program(self, task: ProgramTask, number: int, prompt: Prompt, written: list[int]) -> str:
        """Return the prompt of a problem and the text of generated tokens."""
        # Decoded together: some tokenizers drop the space at the beginning of a text.
        before = self._codec.decode(list(prompt.tokens))
        text = self._codec.decode([*prompt.tokens, *written])[len(before) :]
        return task.problems[number].prompt + (task.cut(text) if self._arguments.postprocess else text)


@final
class ProgramEvaluation:
    """An evaluation on tasks that ask for programs.

    Args:
        arguments: what is evaluated.

    Raises:
        ConfigError: if a task has no file.
        DataError: if a file of problems or programs cannot be used.
        RunError: if programs are to be run, and this machine does not allow a sandbox.
    """

    def __init__(self, arguments: BigCodeArguments) -> None:
        self._arguments = arguments
        folder = arguments.include_path or arguments.load_data_path
        self.tasks = load_problems(arguments.names, folder, arguments.limit_start, arguments.limit)
        self._given = [self._given_programs(number, task) for number, task in enumerate(self.tasks)]
        self._sandbox: Sandbox | None = None
        if arguments.runs_programs:
            self._sandbox = Sandbox(ProgramLimits(arguments.timeout, arguments.memory_limit))
            self._sandbox.check()  # now: a refusal must not come after hours of generation

    def run(self, files: ProgramFiles, writer: ProgramWriter | None) -> dict[str, Any]:
        """Write programs, run them if that is allowed, and save both.

        Args:
            files: where they are saved.
            writer: writes the programs; `None` if programs are given.

        Returns:
            The metrics of each task by its name, `outcomes` (for each problem the result of each program) and
            `config`; empty if no program ran.
        """
        outcomes: dict[str, list[list[Outcome]]] = {}
        for task, given in zip(self.tasks, self._given, strict=True):
            programs = given
            if writer is not None:
                programs = self._written(task, given, files, writer)
                files.save_programs(task, programs)
                files.save_references(task)
            if self._sandbox is not None:
                outcomes[task.name] = self._outcomes(task, programs, self._sandbox)
        if not outcomes:
            return {}
        results: dict[str, Any] = {
            name: pass_rates([[each.passed for each in problem] for problem in found])
            for name, found in outcomes.items()
        }
        told = {name: [[each.result for each in row] for row in found] for name, found in outcomes.items()}
        return results | {"outcomes": told, "config": self._arguments.model_dump(mode="json")}

    def _given_programs(self, number: int, task: ProgramTask) -> Programs:
        """Return the programs that are there before the model writes any."""
        arguments, count = self._arguments, len(task.problems)
        if arguments.check_references:
            return [[solution] for solution in _solutions(task)]
        if arguments.load_generations_path is not None:
            programs = read_programs(arguments.load_generations_path)[:count]
            if len(programs) < count or not all(programs):
                raise DataError(
                    f"expected programs for {counted(count, 'problem', 'problems')} of {task.name}, "
                    f"got them for {sum(map(bool, programs))}",
                    where=str(arguments.load_generations_path),
                    remedy="name the programs of this task, with the same limit and limit_start",
                )
            return programs
        if arguments.load_generations_intermediate_paths is not None:
            path = arguments.load_generations_intermediate_paths[number]
            return [each for each in read_programs(path) if each][:count]
        return []

    def _written(
        self, task: ProgramTask, given: Programs, files: ProgramFiles, writer: ProgramWriter
    ) -> Programs:
        """Return the given programs, and written ones for the other problems."""
        programs, count = list(given), len(task.problems)
        step = self._arguments.save_every_k_tasks
        while len(programs) < count:
            last = min(len(programs) + step, count) if step > 0 else count
            programs += writer.write(task, len(programs), last)
            if last < count:
                files.save_programs(task, programs, complete=False)
        return programs

    def _outcomes(self, task: ProgramTask, programs: Programs, sandbox: Sandbox) -> list[list[Outcome]]:
        """Run the programs of a task, each with the tests of its problem."""
        pairs = zip(programs, task.problems, strict=True)
        texts = [f"{text}\n{problem.reference}" for each, problem in pairs for text in each]
        workers = self._arguments.max_workers or len(os.sched_getaffinity(0))
        total = counted(len(texts), "program", "programs")
        with notice_if_long(f"running {total} of {task.name}") as activity:

            def done(count: int) -> None:
                activity.name = f"running the programs of {task.name}: {count} of {total}"

            found = iter(sandbox.run_all(texts, workers, done))
        return [[next(found) for _ in each] for each in programs]


def _solutions(task: ProgramTask) -> list[str]:
    """Return the solutions that come with the problems.

    Raises:
        DataError: if a problem lacks its solution.
    """
    found = [problem.solution for problem in task.problems if problem.solution is not None]
    if len(found) < len(task.problems):
        raise DataError(
            f"{len(task.problems) - len(found)} problems of {task.name} have no solution",
            where="check_references",
            remedy="give each problem canonical_solution (form of HumanEval) or code (form of MBPP)",
        )
    return found


def read_programs(path: Path) -> Programs:
    """Read programs from a file: a list for each problem.

    Raises:
        DataError: if the file does not have this form.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"the programs cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="name a file of saved generations",
        ) from error
    if _are_programs(found):
        return found
    raise DataError(
        "expected a list with a list of programs for each problem",
        where=str(path),
        remedy="name a file of saved generations, such as generations_humaneval.json",
    )


def _are_programs(value: object) -> TypeGuard[Programs]:
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, list) and all(isinstance(text, str) for text in row) for row in rows)


def describe(results: dict[str, Any], tasks: Sequence[ProgramTask]) -> str:
    """Return the results as lines of text."""
    lines = []
    for task in tasks:
        kinds = collections.Counter(
            each.partition(":")[0] for row in results["outcomes"][task.name] for each in row
        )
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in results[task.name].items())
        counts = ", ".join(
            f"{kinds[kind]} {kind}" for kind in ("passed", "failed", "timed out") if kinds[kind]
        )
        programs = counted(kinds.total(), "program", "programs")
        lines.append(f"{task.name}: {numbers} ({programs}: {counts})")
    return "\n".join(lines)


def metrics(results: dict[str, Any], tasks: Sequence[ProgramTask]) -> dict[str, float]:
    """Return each metric by `task/metric`; empty if no program ran."""
    return {
        f"{task.name}/{name}": value for task in tasks for name, value in results.get(task.name, {}).items()
    }
