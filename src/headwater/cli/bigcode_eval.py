"""`headwater bigcode_eval`: evaluate a language model on tasks that ask for programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headwater.cli.arguments import USAGE, add_model_arguments, read_model
from headwater.cli.evaluation_ranks import refuse_ranks
from headwater.cli.harness_options import Options, add_options, read_options
from headwater.cli.output import open_console
from headwater.config.bigcode import BigCodeArguments
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.evaluation.programs import ProgramEvaluation, ProgramFiles, ProgramWriter, describe
from headwater.trainer.inference import Inference, open_scorer
from headwater.trainer.tokenizer import model_codec

_PLACE = "headwater bigcode_eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater bigcode_eval`."""
    parser.description = (
        "Evaluate a checkpoint on tasks in the forms of HumanEval and MBPP. PARAMS may also be a folder "
        "of the transformers library, with config.json and weights. PARAMS is not needed to run programs "
        "that were written before."
    )
    parser.usage = f"headwater bigcode_eval [-h] {USAGE} --tasks TASK[,TASK ...]"
    add_model_arguments(parser, several_ranks=False, optional=True)
    add_options(parser, _OPTIONS)


_OPTIONS: Options = (
    ("tasks", str, "tasks with commas between them: names of files without .jsonl, or paths of such files"),
    ("include_path", str, "folder with a file TASK.jsonl for each task"),
    ("load_data_path", str, "the same as --include_path"),
    ("n_samples", int, "programs for each problem (1)"),
    ("temperature", float, "temperature of generated tokens; 0: always the most likely token (0.2)"),
    ("top_k", int, "draw only among the k most likely tokens; 0: among all (0)"),
    ("top_p", float, "draw only among the most likely tokens whose probability reaches this (0.95)"),
    ("seed", int, "seed of drawn tokens (0)"),
    ("prefix", str, "text before each prompt"),
    ("max_length_generation", int, "largest number of tokens of prompt and program together (512)"),
    ("max_tokens", int, "largest number of tokens of a program, instead of --max_length_generation"),
    ("limit", int, "largest number of problems of each task"),
    ("limit_start", int, "number of problems to leave out before the first one"),
    ("allow_code_execution", bool, "run the programs with their tests in a sandbox"),
    ("generation_only", bool, "write programs without running them"),
    ("load_generations_path", str, "file with programs that are run instead of new ones"),
    (
        "load_generations_intermediate_paths",
        list,
        "for each task, a file with programs of its first problems",
    ),
    ("save_every_k_tasks", int, "save the programs after this number of problems"),
    ("save_generations", bool, "write the programs, which is the default"),
    ("save_generations_path", str, "file of the programs; the task is added to its name (generations.json)"),
    ("save_references", bool, "write the tests, which is the default"),
    ("save_references_path", str, "file of the tests; the task is added to its name (references.json)"),
    ("metric_output_path", str, "file of the results (evaluation_results.json)"),
    ("check_references", bool, "run the solutions that come with the problems, without a model"),
    ("timeout", float, "seconds that a program may take (3)"),
    ("memory_limit", str, "address space of each process of a program (1GiB)"),
    ("max_workers", int, "programs that run at once (the number of cores)"),
    ("instruction_tokens", str, "no effect: no task here has instructions"),
    ("prompt", str, "no effect: no task here has instructions"),
)


def run(args: argparse.Namespace) -> int:
    """Have a model write programs, run them if that is allowed, and print results; return the exit code."""
    config = None if args.params is None else read_model(args)
    arguments = _arguments(args, config)
    files = ProgramFiles(Path(), arguments)
    files.check()
    evaluation = ProgramEvaluation(arguments)
    results = _results(args, config, arguments, evaluation, files)
    if not results:
        print(f"programs: {files.of_programs(evaluation.tasks)}; no program was run (--allow_code_execution)")
        return 0
    print(describe(results, evaluation.tasks))
    print(f"results: {files.save_results(results)}")
    return 0


def _results(
    args: argparse.Namespace,
    config: RunConfig | None,
    arguments: BigCodeArguments,
    evaluation: ProgramEvaluation,
    files: ProgramFiles,
) -> dict[str, Any]:
    if not arguments.generates:
        return evaluation.run(files, None)
    if config is None:
        raise ConfigError(
            "expected a model that writes programs, but the command does not name one",
            where=_PLACE,
            remedy="name a run or a params file, or written programs with --load_generations_path",
        )
    refuse_ranks(args)
    open_console(config)
    codec = model_codec(config, args.tokenizer, args.eos_id)
    inference = Inference(args.batch_size, args.max_sequence_length, args.checkpoint_path, generates=True)
    with open_scorer(config, inference) as scorer:
        return evaluation.run(files, ProgramWriter(scorer, codec, arguments))


def _arguments(args: argparse.Namespace, config: RunConfig | None) -> BigCodeArguments:
    """Return the arguments of the evaluation: those of the params' callback, replaced by options.

    Raises:
        ConfigError: if no task is named, or an option is not valid.
    """
    sections = [] if config is None else config.init.bigcode_harnesses
    given = next((section.bigcode_args for section in sections), None)
    arguments = read_options(BigCodeArguments, "bigcode_args", _OPTIONS, args, given)
    if not arguments.names:
        raise ConfigError(
            "expected at least one task, but the command and the params do not name any",
            where=_PLACE,
            remedy="add --tasks, such as --tasks humaneval --include_path FOLDER",
        )
    return arguments
