"""`headwater lm_eval`: evaluate a language model on the tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.arguments import USAGE, add_model_arguments, read_model
from headwater.cli.evaluation_ranks import run_evaluation
from headwater.cli.harness_options import Options, add_options, read_options
from headwater.config.harness import HarnessArguments
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.data.codec import Codec
from headwater.fabric.fabric import Fabric
from headwater.trainer.harness import evaluate_tasks, load_tasks
from headwater.trainer.inference import Inference

if TYPE_CHECKING:
    from headwater.evaluation.tasks import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater lm_eval`."""
    parser.description = (
        "Evaluate a checkpoint on tasks of EleutherAI's lm-evaluation-harness. PARAMS may also be a folder "
        "of the transformers library, with config.json and weights."
    )
    parser.usage = f"headwater lm_eval [-h] {USAGE} --tasks TASK[,TASK ...]"
    add_model_arguments(parser)
    add_options(parser, _OPTIONS, _SHORT)


_SHORT = {
    "tasks": ("-t",),
    "num_fewshot": ("-f",),
    "limit": ("-L",),
    "write_out": ("-w",),
    "log_samples": ("-s",),
    "predict_only": ("-x",),
}

_OPTIONS: Options = (
    ("tasks", str, "tasks or groups of tasks with commas between them, or YAML files of tasks"),
    ("num_fewshot", int, "solved examples before each question"),
    ("output_path", str, "a .json file for the results, or a folder for results and samples"),
    ("limit", float, "largest number of questions of each task; below 1: fraction of them"),
    ("use_cache", str, "path of a database of answers, for later evaluations of the same weights"),
    ("cache_requests", str, "true, refresh or delete: keep the prompts of the tasks on disk"),
    ("check_integrity", bool, "run the harness's checks of the tasks"),
    ("write_out", bool, "print the first prompts of each task"),
    ("log_samples", bool, "write every question and answer beside the results; needs --output_path"),
    ("system_instruction", str, "system message before each prompt"),
    ("apply_chat_template", bool, "write prompts as conversations"),
    ("fewshot_as_multiturn", bool, "write each solved example as separate messages"),
    ("show_config", bool, "print the results with the settings of all tasks as JSON"),
    ("include_path", str, "folder with more task files"),
    ("predict_only", bool, "write answers without metrics; needs --output_path"),
    ("seed", str, "seeds of random, numpy, torch and the choice of examples (0,1234,1234,1234)"),
    ("trust_remote_code", bool, "not supported"),
    ("max_tokens", int, "largest number of tokens to generate"),
    ("temperature", float, "temperature of generated tokens; 0: always the most likely token"),
    ("top_k", int, "generate only among the k most likely tokens"),
    ("top_p", float, "generate only among the most likely tokens whose probability reaches this"),
    (
        "truncate",
        bool,
        "shorten prompts that are too long, from their beginning, instead of ending with an error",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Evaluate a model, print the results and write them; return the exit code."""
    config = read_model(args)
    arguments = harness_arguments(args, config)

    def evaluate(codec: Codec, fabric: Fabric) -> Results | None:
        tasks = load_tasks(arguments)
        length = args.max_sequence_length
        inference = Inference(args.batch_size, length, args.checkpoint_path, tasks.generates)
        return evaluate_tasks(config, arguments, inference, codec, tasks, fabric)

    return run_evaluation(config, args, evaluate, functools.partial(_report, arguments))


def _report(arguments: HarnessArguments, results: Results | None) -> int:
    """Print the results, write their files, and return the exit code."""
    from headwater.evaluation.tasks import as_json, tables, write_results

    assert results is not None, "rank 0 is the first rank of its host"
    if arguments.show_config:
        print(as_json(results))
    print(tables(results))
    if arguments.output_path is not None:
        print(f"results: {write_results(results, Path(arguments.output_path))}")
    return 0


def harness_arguments(args: argparse.Namespace, config: RunConfig) -> HarnessArguments:
    """Return the arguments of the harness: those of the params' callback, replaced by options.

    Raises:
        ConfigError: if tasks are missing, or an option is not valid.
    """
    section = next(iter(config.init.eleuther_harnesses), None)
    given = None if section is None else section.eeh_args
    arguments = read_options(HarnessArguments, "eeh_args", _OPTIONS, args, given)
    num_csx = config.init.backend.cluster_config.num_csx
    for problem, remedy in _problems(arguments, num_csx):
        raise ConfigError(problem, where="headwater lm_eval", remedy=remedy)
    return arguments


def _problems(arguments: HarnessArguments, num_csx: int) -> Iterator[tuple[str, str]]:
    """Yield what is missing or does not fit together, each with its remedy."""
    if not arguments.names:
        problem = "expected at least one task, but the command and the params do not name any"
        yield problem, "add --tasks, such as --tasks lambada_openai,hellaswag"
    if (arguments.log_samples or arguments.predict_only) and arguments.output_path is None:
        yield "samples cannot be written without an output path", "add --output_path with a folder"
    caches = {"use_cache": arguments.use_cache, "cache_requests": arguments.cache_requests}
    for name in (name for name, value in caches.items() if value is not None and num_csx > 1):
        # Each rank would read and write the same database.
        yield f"{name} needs num_csx 1, got {num_csx}", f"add --num_csx 1, or leave --{name} out"
