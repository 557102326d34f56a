"""Sections of params files for tasks that ask for programs; their keys are those of the public Model Zoo."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from headwater.config.base import Bytes, FilePath, NoEffect, OneOrMore, Section
from headwater.config.harness import TaskCallback, task_names

_Instructions = NoEffect("no task here has instructions")


class BigCodeArguments(Section):
    """The section `bigcode_args`: the arguments of an evaluation on tasks that ask for programs.

    Attributes:
        tasks: names of tasks, as a list or with commas between them, or .jsonl files with problems.
        include_path: folder with a file TASK.jsonl for each task.
        load_data_path: the same as `include_path`.
        n_samples: programs for each problem.
        do_sample: draw tokens at random; otherwise take the most likely ones.
        temperature: temperature of drawn tokens; 0: always the most likely token.
        top_k: draw only among the k most likely tokens; 0: among all.
        top_p: draw only among the most likely tokens whose probability reaches this.
        seed: seed of drawn tokens.
        prefix: text before each prompt.
        max_length_generation: largest number of tokens of prompt and program together.
        max_tokens: largest number of tokens of a program; replaces `max_length_generation`.
        limit: largest number of problems of each task.
        limit_start: number of problems to leave out before the first one.
        postprocess: cut programs at the stop words of the task.
        allow_code_execution: run the programs with their tests in a sandbox; otherwise only write them.
        generation_only: write programs without running them; the default without `allow_code_execution`.
        load_generations_path: file with programs that are run instead of new ones.
        load_generations_intermediate_paths: for each task, a file with the programs of its first problems.
        save_every_k_tasks: save the programs after every k problems; -1: only at the end.
        save_generations: write the programs.
        save_generations_path: file of the programs; the name of the task is added.
        save_references: write the tests.
        save_references_path: file of the tests; the name of the task is added.
        metric_output_path: file of the results; evaluation_results.json if not given.
        check_references: run the solutions that come with the problems, instead of the model's programs.
        timeout: seconds that a program may take.
        memory_limit: bytes of address space of each process of a program; at least 64 MiB.
        max_workers: programs that run at once.
    """

    tasks: Annotated[tuple[str, ...], OneOrMore] = ()
    include_path: FilePath | None = None
    load_data_path: FilePath | None = None
    n_samples: int = Field(default=1, ge=1)
    do_sample: bool = True
    temperature: float = Field(default=0.2, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    seed: int = 0
    prefix: str = ""
    max_length_generation: int = Field(default=512, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    limit: int | None = Field(default=None, ge=1)
    limit_start: int = Field(default=0, ge=0)
    postprocess: bool = True
    allow_code_execution: bool = False
    generation_only: bool | None = None
    load_generations_path: FilePath | None = None
    load_generations_intermediate_paths: Annotated[tuple[FilePath, ...] | None, OneOrMore] = None
    save_every_k_tasks: int = Field(default=-1, ge=-1)
    save_generations: bool = True
    save_generations_path: str = "generations.json"
    save_references: bool = True
    save_references_path: str = "references.json"
    metric_output_path: str | None = None
    check_references: bool = False
    timeout: float = Field(default=3.0, gt=0)
    memory_limit: Annotated[Bytes, Field(ge=64 << 20)] = 1 << 30
    max_workers: int | None = Field(default=None, ge=1)
    instruction_tokens: Annotated[str | None, _Instructions] = None
    prompt: Annotated[str | None, _Instructions] = None

    @model_validator(mode="after")
    def _running_is_allowed(self) -> Self:
        asked = {
            "generation_only: false": self.generation_only is False,
            "load_generations_path": self.load_generations_path is not None,
            "check_references": self.check_references,
            "metric_output_path": self.metric_output_path is not None,
        }
        reasons = [key for key, value in asked.items() if value]
        if reasons and not self.allow_code_execution:
            raise ValueError(
                f"{reasons[0]} needs allow_code_execution, because the programs of a model must run for it; "
                "add allow_code_execution to run them in a sandbox"
            )
        if reasons and self.generation_only:
            raise ValueError(
                f"generation_only runs no program, and {reasons[0]} needs that; remove one of them"
            )
        if self.include_path is not None and self.load_data_path is not None:
            raise ValueError("include_path and load_data_path are the same folder; remove one of them")
        return self

    @model_validator(mode="after")
    def _one_file_for_each_task(self) -> Self:
        paths = self.load_generations_intermediate_paths
        if paths is not None and len(paths) != len(self.names):
            raise ValueError(
                f"expected {len(self.names)} load_generations_intermediate_paths, one for each task; "
                f"got {len(paths)}"
            )
        if self.load_generations_path is not None and len(self.names) > 1:
            raise ValueError(f"load_generations_path is for one task, got {len(self.names)} tasks")
        return self

    @property
    def names(self) -> list[str]:
        """The tasks, each with its own entry."""
        return task_names(self.tasks)

    @property
    def runs_programs(self) -> bool:
        """True if programs are run and metrics computed."""
        return self.allow_code_execution and not self.generation_only

    @property
    def generates(self) -> bool:
        """True if the model writes programs."""
        return self.load_generations_path is None and not self.check_references


class BigCodeEvalHarnessConfig(TaskCallback):
    """An evaluation on tasks that ask for programs, during training and at its end.

    Attributes:
        bigcode_args: the tasks, and how they are evaluated.
    """

    bigcode_args: BigCodeArguments
    name_scope: str = "bigcode_0"
    bos_token: Annotated[str | None, NoEffect("it is found in the tokenizer's files")] = None

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if not self.bigcode_args.names:
            raise ValueError("bigcode_args needs tasks, such as tasks: humaneval,mbpp")
        if not self.bigcode_args.generates:
            raise ValueError(
                "load_generations_path and check_references need no model; use headwater bigcode_eval"
            )
        return self
