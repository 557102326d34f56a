"""Runs a model that the user has written, with functions and options as in the Cerebras Model Zoo.

`run` trains the user's model; `python -m headwater.run` trains a built-in one. Both take the same options:

--params P --mode train|eval|train_and_eval [--num_csx N] [--num_steps N] [--model_dir DIR]
[--checkpoint_path PATH] [--compile_only | --validate_only] [--key VALUE …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headwater.api.ranks import refuse_restarts
from headwater.cli import fit, validate, without_training
from headwater.cli.arguments import add_override_options, overrides, read_params
from headwater.cli.main import guarded, prepare_process, require_working_directory
from headwater.cli.output import open_console
from headwater.cli.parser import Parser
from headwater.config.files import find_params
from headwater.config.user import UserConfig, load_user_params
from headwater.core.errors import ConfigError
from headwater.fabric.cluster import join
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.launch.script import use_ranks
from headwater.trainer.base_model import ModelClass, PyTorchBaseModel
from headwater.trainer.ranks import keys_of
from headwater.trainer.run_dir import RunDir
from headwater.trainer.session import fit_job
from headwater.trainer.user_job import DataFunction, evaluate_user_model, user_example, user_job

__all__ = ["PyTorchBaseModel", "main", "run"]

MODES = ("train", "eval", "train_and_eval")


def run(
    model_class: ModelClass,
    get_train_dataloader: DataFunction,
    get_eval_dataloader: DataFunction | None = None,
    *,
    argv: Sequence[str] | None = None,
) -> None:
    """Train or evaluate the user's model, as the params file and the command line say.

    A run resumes from the newest checkpoint in its model_dir. The results are bit-identical to those of a run
    that never stopped.

    Args:
        model_class: a subclass of `PyTorchBaseModel`. It is constructed with all sections of the params file.
        get_train_dataloader: called with the same sections. Returns a DataLoader or another iterable of
            batches that can be iterated over more than once. A batch is tensors [batch, …] in any nesting.
        get_eval_dataloader: the same for evaluation data; needed unless the mode is `train`.
        argv: the command line; `sys.argv[1:]` if `None`.

    Raises:
        SystemExit: if the run fails or is interrupted. The error has then been printed, and the exit code is
            that of `headwater.cli.main.main`.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def start() -> int:
        args = _parse(words, Path(sys.argv[0]).name)
        config = _read_user_params(args)
        if without_training.asked_for(config):
            return without_training.compile_or_validate(
                config, *user_example(config, model_class, get_train_dataloader)
            )
        evaluations = None if args.mode == "train" else _require_eval_data(get_eval_dataloader, args.mode)
        fabric = ALONE if args.mode == "eval" else _ranks(config)
        console = open_console(config)
        if evaluations is not None and args.mode == "eval":
            validate.print_found(evaluate_user_model(config, model_class, evaluations))
            return 0
        job = user_job(config, model_class, get_train_dataloader, evaluations, fabric)
        return fit.finish(config, fit_job(job, console=console, fabric=fabric), console)

    if code := guarded(start):
        raise SystemExit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in the Model Zoo's form and return the exit code, as `headwater.cli.main.main` does.

    Args:
        argv: the command line; `sys.argv[1:]` if `None`.
    """
    if argv is None:
        prepare_process()

    def start() -> int:
        args = _parse(sys.argv[1:] if argv is None else argv, "python -m headwater.run")
        require_working_directory()
        config = read_params(args)
        if args.mode == "eval" and not without_training.asked_for(config):
            return validate.evaluate(config)
        # Each rank runs the command `headwater fit`, which trains the same run.
        words = ["fit", args.params, *args.overrides]
        with fit.ranks_here(config, words, is_process=argv is None) as code:
            return fit.train(config) if code is None else code

    return guarded(start)


def _parse(words: Sequence[str], prog: str) -> argparse.Namespace:
    """Parse the command line. Values that replace those of the params file are in `overrides`."""
    parser = Parser(prog=prog, description="Train or evaluate a model as a params file says.")
    parser.add_argument("--params", required=True, metavar="PARAMS", help="params file")
    parser.add_argument(
        "--mode", required=True, choices=MODES, help="train_and_eval also evaluates during training"
    )
    without_training.add_options(parser)
    add_override_options(parser)
    args: argparse.Namespace
    args, rest = parser.parse_known_args(words)
    args.overrides = [*args.flags, *overrides(parser, rest)]
    if args.mode == "train":
        args.overrides.append("eval_frequency=0")
    return args


def _require_eval_data(get_eval_dataloader: DataFunction | None, mode: str) -> DataFunction:
    if get_eval_dataloader is None:
        raise ConfigError(
            f"mode {mode} needs evaluation data, but get_eval_dataloader is None",
            where="run",
            remedy="pass get_eval_dataloader to run, or write --mode train",
        )
    return get_eval_dataloader


def _ranks(config: UserConfig) -> Fabric:
    """Start the ranks that the params ask for, unless a launcher has done so. Return all ranks."""
    cluster, section = config.init.backend.cluster_config, "trainer.init.backend.cluster_config"
    refuse_restarts(cluster, where=f"{section}.max_restarts")
    if cluster.num_csx > 1:
        where = f"{section}.num_csx"
        use_ranks(cluster.num_csx, where=where, timeout_s=cluster.rank_timeout_s)
    fabric = join(cluster.rank_timeout_s)
    if fabric.num_hosts > 1:
        check_consistency(fabric, dict(keys_of(config.params)))
    return fabric


def _read_user_params(args: argparse.Namespace) -> UserConfig:
    folder = Path(args.params).expanduser()
    path = RunDir(folder).require_params() if folder.is_dir() else find_params(args.params)
    return load_user_params(path, args.overrides)


if __name__ == "__main__":
    raise SystemExit(main())
