"""Sections of params files for lm-evaluation-harness; their keys are those of the public Model Zoo."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import FilePath, NoEffect, OneOrMore, Section

_Loader = NoEffect("requests are never written to disk")


class HarnessArguments(Section):
    """The section `eeh_args`: the arguments of lm-evaluation-harness.

    Attributes:
        tasks: names of tasks or groups, as a list or with commas between them, or YAML files of tasks.
        num_fewshot: solved examples before each question.
        output_path: a .json file for the results, or a folder for it and the samples.
        limit: largest number of questions of each task; below 1: fraction of them.
        use_cache: path of a database of answers, which a later evaluation of the same weights reuses.
        cache_requests: keep the prompts of the tasks on disk.
        check_integrity: run the harness's checks of the tasks.
        write_out: print the first prompts of each task.
        log_samples: write every question and answer beside the results.
        system_instruction: system message before each prompt.
        apply_chat_template: write prompts as conversations.
        fewshot_as_multiturn: write each solved example as separate messages.
        show_config: print the results with the settings of all tasks as JSON.
        include_path: folder with more task files.
        predict_only: write answers without metrics.
        seed: seeds of random, numpy, torch and the choice of examples, with commas between them; or one
            for all.
        trust_remote_code: accepted only as false, because it would run code from the internet.
        max_tokens: largest number of tokens to generate.
        temperature: temperature of generated tokens; 0: always the most likely token.
        top_k: generate only among the k most likely tokens.
        top_p: generate only among the most likely tokens whose probability reaches this.
        truncate: shorten prompts that are too long for the model, from their beginning; otherwise they are
            errors.
    """

    tasks: Annotated[tuple[str, ...], OneOrMore] = ()
    num_fewshot: int | None = Field(default=None, ge=0)
    output_path: str | None = None
    limit: float | None = Field(default=None, gt=0)
    use_cache: str | None = None
    cache_requests: Literal["true", "refresh", "delete"] | None = None
    check_integrity: bool = False
    write_out: bool = False
    log_samples: bool = False
    system_instruction: str | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    show_config: bool = False
    include_path: FilePath | None = None
    predict_only: bool = False
    seed: int | str = "0,1234,1234,1234"
    trust_remote_code: Literal[False] = False
    verbosity: Annotated[str | None, NoEffect("log_level of the run sets the messages")] = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    truncate: bool = False

    @model_validator(mode="after")
    def _seeds_are_numbers(self) -> Self:
        _seeds(self.seed)
        return self

    @property
    def names(self) -> list[str]:
        """The tasks, each with its own entry."""
        return task_names(self.tasks)

    @property
    def seeds(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Seeds of Python's random, numpy, torch, and the choice of solved examples; `None`: not seeded."""
        return _seeds(self.seed)


def task_names(entries: Iterable[str]) -> list[str]:
    """Return the names of tasks in entries that may have several, with commas between them."""
    return [name.strip() for entry in entries for name in entry.split(",") if name.strip()]


def _seeds(given: int | str) -> tuple[int | None, int | None, int | None, int | None]:
    words = [word.strip() for word in str(given).split(",")]
    try:
        found = [None if word == "None" else int(word) for word in words]
    except ValueError:
        found = []
    if len(found) == 1:
        found *= 4
    if len(found) == 3:
        found.append(1234)
    if len(found) != 4:
        raise ValueError(
            f"expected seed to be a number, or three or four with commas between them; got {given!r}"
        )
    return found[0], found[1], found[2], found[3]


class TaskCallback(Section):
    """The keys of a callback that evaluates on tasks during training, and at its end.

    Attributes:
        every_n_vals: run at every n-th multiple of the loop's `eval_frequency`.
        batch_size: largest number of sequences of full length that are computed at once; at most, and by
            default, the micro-batch of the plan.
        max_sequence_length: largest number of tokens that the model may read at once; its positions if not
            given.
        tokenizer_file_path: file `tokenizer.json`; that of the training data if not given.
        pretrained_model_name_or_path: a local folder with a tokenizer, instead of `tokenizer_file_path`.
        eos_id: id of the token that ends a text; found in the tokenizer's files if not given.
        name_scope: folder in the model_dir for the results.
    """

    every_n_vals: int = Field(default=1, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    max_sequence_length: int | None = Field(default=None, ge=2)
    tokenizer_file_path: FilePath | None = None
    pretrained_model_name_or_path: FilePath | None = None
    eos_id: int | None = Field(default=None, ge=0)
    name_scope: str
    keep_data_dir: Annotated[bool, _Loader] = False
    data_dir: Annotated[str | None, _Loader] = None
    shuffle: Annotated[bool, NoEffect("requests are sorted by length")] = False
    num_workers: Annotated[int, _Loader] = 0
    flags: Annotated[dict[str, Any] | None, NoEffect("it only configures a Cerebras system")] = None

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that the section names."""
        return self.tokenizer_file_path or self.pretrained_model_name_or_path


class EleutherEvalHarnessConfig(TaskCallback):
    """An evaluation with lm-evaluation-harness during training, and at its end.

    Attributes:
        eeh_args: the tasks, and how they are evaluated.
    """

    eeh_args: HarnessArguments
    name_scope: str = "eleuther_0"

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if not self.eeh_args.names:
            raise ValueError("eeh_args needs tasks, such as tasks: winogrande,hellaswag")
        return self
