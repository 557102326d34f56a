"""`headwater validate`: evaluate a checkpoint."""

from __future__ import annotations

import argparse

from headwater.cli.arguments import EVALUATION, USAGE, add_params_arguments, read_params
from headwater.cli.following import add_interrupt_option
from headwater.cli.output import open_console
from headwater.cli.remote_commands import validate_there
from headwater.config.run import RunConfig
from headwater.core.units import counted
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.session import validate, validate_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater validate`."""
    parser.description = (
        "Evaluate the newest checkpoint in the model_dir, or that of --checkpoint_path, "
        "on the data of the section `validate`, or else on the validation data of the section `fit`. "
        "With --appliance ssh://host the checkpoints are those of the run on that machine."
    )
    parser.usage = f"headwater validate [-h] [--all] {USAGE}"
    add_params_arguments(parser, EVALUATION)
    parser.add_argument(
        "--all",
        action="store_true",
        help="evaluate several checkpoints on all data of the section `validate_all`: those in its "
        "`ckpt_paths`, or all in the model_dir",
    )
    add_interrupt_option(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint, or all with --all; return the exit code."""
    config = read_params(args)
    if args.appliance is not None:
        return validate_there(config, args, args.appliance)
    return evaluate_all(config) if args.all else evaluate(config)


def evaluate(config: RunConfig) -> int:
    """Evaluate a checkpoint, print the loss and metrics, and return the exit code."""
    open_console(config)
    several = config.validation is None and config.fit is not None and len(config.fit.val_dataloader) > 1
    for loader, found in validate(config):
        if several:
            print(loader.place)
        print_found(found)
    return 0


def print_found(found: Evaluation) -> None:
    """Print the loss and the metrics, each on a line."""
    print(f"validation loss {found.loss:.6f} ({counted(found.batches, 'batch', 'batches')})")
    for name, value in found.metrics.items():
        print(f"{name} {value:.6f}")


def evaluate_all(config: RunConfig) -> int:
    """Evaluate all checkpoints, print their losses, and return the exit code."""
    open_console(config)
    for path, loader, found in validate_all(config):
        batches = counted(found.batches, "batch", "batches")
        print(f"{path}  {loader.place}  validation loss {found.loss:.6f} ({batches})")
    return 0
