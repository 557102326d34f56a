"""Command-line arguments of runs: a params file, and options that replace values in it."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from headwater.cli.parser import Parser
from headwater.config.files import find_params
from headwater.config.overrides import RATES, SHORT_NAMES
from headwater.config.run import RunConfig, library_run, load_params
from headwater.trainer.run_dir import RunDir

USAGE = "PARAMS [--option VALUE ...] [key=value ...]"


_OF_EVERY_RUN = frozenset({"model", "model_dir", "seed"})
_RANKS = frozenset({"num_csx", "num_memx"})
_MACHINE = frozenset({"target_device", "device_memory", "host_memory", "disk", "micro_batch_size"})
EVALUATION = _OF_EVERY_RUN | _MACHINE | {"eval_steps", "checkpoint_path"}
"""The options of params files that have an effect on an evaluation."""
PLANNING = _OF_EVERY_RUN | _MACHINE | _RANKS | {"batch_size"}
"""The options of params files that have an effect on a plan."""


def add_params_arguments(
    parser: argparse.ArgumentParser,
    shown: Collection[str] = tuple(SHORT_NAMES),
    *,
    without: Collection[str] = (),
    optional: bool = False,
    or_model: bool = False,
) -> None:
    """Add the argument PARAMS and the options that replace values of the params file.

    Args:
        parser: parser of the command.
        shown: options that the help lists. The others are accepted too: they set keys of the same file.
        without: options that are not added, because the command itself has options with these names.
        optional: PARAMS may be left out.
        or_model: PARAMS may also be a folder of the transformers library.
    """
    choices = ["a params file", "the name of a shipped one (such as gpt/tiny)", "the model_dir of a run"]
    if or_model:
        choices.append("a folder of the transformers library, with config.json and weights")
    parser.add_argument(
        "params",
        nargs="?" if optional else None,
        metavar="PARAMS",
        help=f"{', '.join(choices[:-1])}, or {choices[-1]}",
    )
    add_override_options(parser, shown, without=without)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the checkpoint and the tokenizer of a language model."""
    parser.add_argument("--checkpoint_path", type=Path, metavar="PATH", help="checkpoint to use (the newest)")
    parser.add_argument(
        "--tokenizer",
        "--tokenizer_file_path",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or a folder with a tokenizer (the one in the folder of the run or model)",
    )
    parser.add_argument("--eos_id", type=int, metavar="ID", help="end-of-text token (found in the tokenizer)")


def add_model_arguments(
    parser: argparse.ArgumentParser, *, several_ranks: bool = True, optional: bool = False
) -> None:
    """Add the arguments of commands that evaluate a language model.

    Args:
        parser: parser of the command.
        several_ranks: the command can run on several compute ranks.
        optional: PARAMS may be left out.
    """
    own = {"batch_size", "checkpoint_path", "seed"}
    shown = (_OF_EVERY_RUN | _MACHINE | {"num_csx"} if several_ranks else _OF_EVERY_RUN | _MACHINE) - own
    add_params_arguments(parser, shown, without=own, optional=optional, or_model=True)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=64,
        metavar="N",
        help="sequences of full length in one pass over the weights, if memory suffices; a pass has more "
        "sequences if they are shorter (%(default)s)",
    )
    parser.add_argument(
        "--max_sequence_length",
        type=int,
        metavar="N",
        help="largest number of tokens to read at once (the model's positions)",
    )


def positive(word: str) -> int:
    """Return a number of at least 1."""
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {word!r}")
    return number


def add_override_options(
    parser: argparse.ArgumentParser,
    shown: Collection[str] = tuple(SHORT_NAMES),
    *,
    without: Collection[str] = (),
) -> None:
    """Add the options that replace values of the params file. They are collected in `flags`."""
    group = parser.add_argument_group(
        "options that replace values of the params file",
        "any other key is set by its path: trainer.init.seed=1",
    )
    for name, paths in sorted(SHORT_NAMES.items()):
        if name in without:
            continue
        group.add_argument(
            f"--{name}",
            metavar="VALUE",
            action=_Flag,
            dest="flags",
            default=[],
            nargs="+" if name == "job_labels" else None,
            help=_help_text(name, paths) if name in shown else argparse.SUPPRESS,
        )


_HELP = {
    "autoload_last_checkpoint": "false to start over instead of resuming",
    "batch_size": "samples of one step over all ranks",
    "checkpoint_path": "checkpoint to start from or to evaluate",
    "checkpoint_steps": "steps between checkpoints",
    "compile_dir": "folder for the output of --compile_only",
    "data_dir": "folder of the training data; does not set that of the validation data",
    "device_memory": "memory limit on the GPU, such as 8GiB",
    "disk": "folder for weights that do not fit in memory",
    "epochs": "passes over the training data, instead of the lengths in the file",
    "eval_frequency": "steps between evaluations, or a fraction of the run",
    "eval_steps": "batches of one evaluation",
    "host_memory": "memory limit on the host, such as 8GiB",
    "job_labels": "labels NAME=VALUE of the job, with --submit",
    "job_priority": "priority p1, p2 or p3 of the job, with --submit",
    "learning_rate": "highest learning rate; all schedules are scaled by the same factor",
    "log_steps": "steps between log messages",
    "lr": "the same as --learning_rate",
    "max_restarts": "restarts of the processes after one of them has died",
    "max_steps": "step at which training ends, instead of the lengths in the file",
    "micro_batch_size": "samples that go through the model at once",
    "model": "name of the model",
    "model_dir": "folder of the run",
    "num_csx": "number of compute ranks: processes that each compute a part of every batch",
    "num_memx": "number of store ranks: processes that only keep and update weights",
    "num_steps": "steps to train now, instead of the lengths in the file",
    "seed": "seed of all random numbers",
    "target_device": "CPU, GPU, or CSX for the best device",
}
"""Option in `SHORT_NAMES` -> its help text."""


def _help_text(name: str, paths: Sequence[str]) -> str:
    """Return the meaning of an option, with the keys that it sets."""
    return _HELP[name] if name in RATES else f"{_HELP[name]} ({', '.join(paths)})"


class _Flag(argparse.Action):
    """An argparse action that appends `name=value` to `flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None, "_Flag is only used for options"
        if isinstance(values, list):
            values = json.dumps(values)
        # argparse passes the default list itself, and an append would change it. So a new list is made.
        namespace.flags = [*namespace.flags, f"{option_string.removeprefix('--')}={values}"]


def overrides(parser: Parser, rest: Sequence[str]) -> list[str]:
    """Return `key=value` for each argument that sets a key by its path.

    Args:
        parser: parser of the command, for errors.
        rest: arguments that the parser did not recognise: `--a.b=1`, `--a.b 1` or `a.b=1`.

    Raises:
        ConfigError: if an argument does not have one of these forms.
    """
    found, words = [], deque(rest)
    while words:
        word = words.popleft()
        if word.startswith("--") and "=" not in word and words and not words[0].startswith("--"):
            word += f"={words.popleft()}"
        key, equals, _ = word.partition("=")
        if not equals or ("." not in key and (key.startswith("-") or key not in SHORT_NAMES)):
            raise parser.unknown(word)
        found.append(word)
    return found


def read_params(args: argparse.Namespace) -> RunConfig:
    """Read the params file that the arguments name, with the values that they replace."""
    folder = Path(args.params).expanduser()
    if folder.is_dir():
        return read_model_dir(folder, args.overrides)
    return load_params(find_params(args.params), args.overrides)


def read_model(args: argparse.Namespace) -> RunConfig:
    """Read the params that the arguments name, or make those of a folder of the transformers library."""
    folder = Path(args.params).expanduser()
    return library_run(folder, args.overrides) if _is_of_library(folder) else read_params(args)


def read_folder(folder: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Return the run whose model_dir is `folder`, or make one of a folder of the transformers library.

    Args:
        folder: the folder.
        changes: values that replace those of the run, as `key=value`.

    Raises:
        ConfigError: if the folder is neither.
    """
    return library_run(folder, changes) if _is_of_library(folder) else read_model_dir(folder, changes)


def _is_of_library(folder: Path) -> bool:
    run_dir = RunDir(folder)
    return folder.is_dir() and not run_dir.params.is_file() and run_dir.model_config.is_file()


def read_model_dir(folder: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Return the run whose model_dir is `folder`, even if the folder was moved since the run began.

    Args:
        folder: model_dir of the run.
        changes: values that replace those of the run, as `key=value`.

    Raises:
        ConfigError: if the folder is not the model_dir of a run.
    """
    run_dir = RunDir(folder)
    params = run_dir.require_params()
    here = [f"model_dir={folder}"]
    if run_dir.model_config.is_file():
        here.append(f"trainer.init.model.hf={folder}")
    return load_params(params, [*here, *changes])
