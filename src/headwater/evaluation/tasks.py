"""Tasks of lm-evaluation-harness: loading, running, and their results. Needs the package lm-eval."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from headwater.config.harness import HarnessArguments
from headwater.core.errors import ConfigError, DataError, HeadwaterError
from headwater.core.files import check_place, disk_errors, replace_file
from headwater.core.names import similar
from headwater.core.random_states import DEFAULTS, set_state, state_of
from headwater.evaluation.harness import HarnessModel

Results = dict[str, Any]
"""The results of the harness, as it writes them to JSON."""


class _Loaded(TaskManager):  # type: ignore[misc]
    """The harness's manager of tasks, which loads the data of its tasks once.

    Args:
        arguments: what is evaluated.
        shipped: know the tasks that come with the harness, too. There are thousands, whose files it reads.
    """

    def __init__(self, arguments: HarnessArguments, *, shipped: bool) -> None:
        folder = arguments.include_path
        super().__init__(include_path=None if folder is None else str(folder), include_defaults=shipped)
        self.loaded = super().load(_known(arguments.names, self))

    def load(self, task_list: Any) -> Any:
        return self.loaded


def _load(arguments: HarnessArguments) -> _Loaded:
    """Load the tasks from the user's folder alone if it has all of them, and else from all folders."""
    if arguments.include_path is not None:
        try:
            return _Loaded(arguments, shipped=False)
        except ConfigError:  # another task is meant, which may be one of the harness
            pass
    return _Loaded(arguments, shipped=True)


@final
class Tasks:
    """The tasks of an evaluation, with their data.

    Args:
        arguments: what is evaluated.

    Raises:
        ConfigError: if a task does not exist, or would run code that the model writes.
        DataError: if the data of a task cannot be read.
    """

    def __init__(self, arguments: HarnessArguments) -> None:
        folder = arguments.include_path
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                "the folder of task files does not exist",
                where=f"include_path: {folder}",
                remedy="name the folder that holds the .yaml files of your tasks",
            )
        self._arguments = arguments
        try:
            self._manager = _load(arguments)
        except HeadwaterError:
            raise
        except Exception as error:  # data sets and task files fail in any way
            raise _unreadable(arguments, error) from error
        tasks = self._manager.loaded["tasks"].values()
        unsafe = sorted(task.task_name for task in tasks if getattr(task, "UNSAFE_CODE", False))
        if unsafe:
            raise ConfigError(
                f"the task {', '.join(unsafe)} runs code that the model writes, which is not supported",
                where="tasks",
                remedy="leave the task out; to run it, export the checkpoint and use lm-eval in a container",
            )
        self.generates = any(task.OUTPUT_TYPE == "generate_until" for task in tasks)
        """True if a task asks the model to generate text."""

    def run(self, model: HarnessModel) -> Results | None:
        """Evaluate a model. The states of random generators are the same after it as before.

        Returns:
            The results. The harness returns them on the first rank of a host, and `None` on the others.

        Raises:
            DataError: if a request does not fit into the model.
        """
        arguments = self._arguments
        seeds = arguments.seeds
        caching = arguments.cache_requests
        with _random_states_kept(), _quiet_without_repository():
            results = evaluator.simple_evaluate(
                model=model,
                tasks=arguments.names,
                num_fewshot=arguments.num_fewshot,
                use_cache=arguments.use_cache,
                limit=arguments.limit,
                check_integrity=arguments.check_integrity,
                write_out=arguments.write_out,
                log_samples=arguments.log_samples,
                system_instruction=arguments.system_instruction,
                apply_chat_template=arguments.apply_chat_template,
                fewshot_as_multiturn=arguments.fewshot_as_multiturn,
                gen_kwargs=_generation(arguments),
                task_manager=self._manager,
                predict_only=arguments.predict_only,
                random_seed=seeds[0],
                numpy_random_seed=seeds[1],
                torch_random_seed=seeds[2],
                fewshot_random_seed=seeds[3],
                cache_requests=caching in ("true", "refresh"),
                rewrite_requests_cache=caching == "refresh",
                delete_requests_cache=caching == "delete",
            )
        return None if results is None else dict(results)


def _generation(arguments: HarnessArguments) -> dict[str, Any] | None:
    """Return the arguments that replace those of the tasks; `None` if none was given."""
    given = {
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "max_gen_toks": arguments.max_tokens,
    }
    found = {key: value for key, value in given.items() if value is not None}
    if arguments.temperature is not None:
        found["do_sample"] = arguments.temperature > 0
    return found or None


def _known(names: list[str], manager: TaskManager) -> list[Any]:
    """Return the names of existing tasks that match `names`, and the contents of named task files.

    Raises:
        ConfigError: if a name matches no task.
    """
    found: list[Any] = []
    for name in names:
        if Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
            from lm_eval.utils import load_yaml_config

            found.append(load_yaml_config(name))
            continue
        matching = manager.match_tasks([name])
        if not matching:
            near = similar(name, manager.all_tasks, count=3)
            raise ConfigError(
                f"unknown task {name!r}",
                where="tasks",
                remedy=(f"write {' or '.join(near)}" if near else "list the tasks with `lm_eval ls tasks`")
                + ", or name the folder of your task files with --include_path",
            )
        found += matching
    return found


def _unreadable(arguments: HarnessArguments, error: Exception) -> DataError:
    lines = str(error).strip().splitlines() or [""]
    return DataError(
        f"the tasks cannot be loaded: {type(error).__name__}: {lines[0][:300]}",
        where=f"tasks: {', '.join(arguments.names)}",
        remedy="check the task's dataset_path and data_files; without internet, name local files there "
        "and the folder of the task's YAML with --include_path",
    )


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the global random generators, which the harness seeds, after the context."""
    generators = (*DEFAULTS, torch.default_generator)
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


@contextmanager
def _quiet_without_repository() -> Iterator[None]:
    """Keep the harness from asking git for a commit if the working folder is not in a repository.

    The harness asks at the end of an evaluation, and git would print an error there.
    """
    theirs = evaluator.get_git_commit_hash
    if not _in_repository():
        evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = theirs


def _in_repository() -> bool:
    """True if git finds a repository around the working folder."""
    try:
        found = subprocess.run(["git", "rev-parse", "--git-dir"], capture_output=True, check=False)
    except OSError:  # git is not installed, or must not be run
        return False
    return found.returncode == 0


def metrics(results: Results) -> dict[str, float]:
    """Return each number of the results by `task/metric`, as TensorBoard gets it. Filters follow a comma."""
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def tables(results: Results) -> str:
    """Return the results as the harness prints them."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n".join(parts)


def as_json(results: Results) -> str:
    """Return the results without the samples as JSON."""
    plain = {key: value for key, value in results.items() if key != "samples"}
    return json.dumps(plain, indent=2, default=handle_non_serializable, ensure_ascii=False)


def write_results(results: Results, path: Path, step: int | None = None) -> Path:
    """Write the results, and beside them the samples of each task if there are any.

    Args:
        results: the results.
        path: a `.json` file, or a folder, in which the file is `results.json`.
        step: training steps so far, which the names of files in a folder include.

    Returns:
        The file of the results.

    Raises:
        RunError: if a folder has the name of a file.
        StoreError: if the files cannot be written.
    """
    is_file = path.suffix in (".json", ".jsonl")
    folder = path.parent if is_file else path
    suffix = "" if step is None else f"_{step}"
    check_place(folder, expected="a folder")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    target = path if is_file else folder / f"results{suffix}.json"
    replace_file(target, as_json(results).encode())
    for task, samples in results.get("samples", {}).items():
        text = json.dumps(samples, indent=2, default=handle_non_serializable, ensure_ascii=False)
        replace_file(folder / f"{task}{suffix}.json", text.encode())
    return target
