"""`headwater fit`: train."""

from __future__ import annotations

import argparse
import shlex

from rich.console import Console

from headwater.cli import early
from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.cli.output import open_console
from headwater.config import RunConfig
from headwater.config.user import UserConfig
from headwater.core.errors import HeadwaterError
from headwater.trainer.interrupt import EXIT_CODE
from headwater.trainer.ranks import is_rank, launch, report
from headwater.trainer.run_dir import RunDir
from headwater.trainer.session import FitResult, fit
from headwater.trainer.zoo_job import fit_section, zoo_trainable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater fit`."""
    parser.description = (
        "Train a model. A run goes on from the last checkpoint in its model_dir. "
        "Ctrl-C finishes the step and writes a checkpoint; a second one stops at once."
    )
    parser.usage = f"headwater fit [-h] [--compile_only | --validate_only] {USAGE}"
    early.add_early_options(parser)
    add_params_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains and says where everything is; returns the exit code."""
    config = read_params(args)
    num_csx = config.init.backend.num_csx
    if num_csx > 1 and not is_rank() and not early.asked_for(config):
        return launch(num_csx, args.words)
    try:
        return train(config)
    except HeadwaterError as error:
        if report(error):
            return 1  # the launcher says it, once for all ranks
        raise


def train(config: RunConfig) -> int:
    """Trains, prints where everything is, and returns the exit code.

    What the params ask for in place of training is done instead.
    """
    if early.asked_for(config):
        batch_size = fit_section(config).train_dataloader.batch_size
        return early.check(config, zoo_trainable(config.init), batch_size)
    console = open_console(config)
    return finish(config, fit(config, console=console), console)


def finish(config: RunConfig | UserConfig, result: FitResult, console: Console | None) -> int:
    """Prints where everything is; returns the exit code."""
    if console is not None:
        for line in summary(config, result):
            console.print(line, markup=False, soft_wrap=True)
    return EXIT_CODE if result.interrupted else 0


def summary(config: RunConfig | UserConfig, result: FitResult) -> list[str]:
    """What a finished or interrupted run has left, by lines."""
    run_dir = RunDir(config.init.model_dir)
    files = {
        "checkpoint": result.checkpoint,
        "loss curve": run_dir.loss_curve,
        "TensorBoard": run_dir.tensorboard,
    }
    lines = [f"{name}: {path}" for name, path in files.items() if path is not None and path.exists()]
    if result.interrupted:
        again = "the same command"
        if isinstance(config, RunConfig):
            again = shlex.join(["headwater", "fit", str(config.init.model_dir)])
        return [f"stopped after step {result.step}", *lines, f"go on with: {again}"]
    return [f"done: step {result.step}", *lines]
