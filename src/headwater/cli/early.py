"""`--compile_only` and `--validate_only`: what is done in place of training."""

from __future__ import annotations

import argparse

from rich.console import Console

from headwater.cli.output import open_console
from headwater.config import RunConfig
from headwater.config.user import UserConfig
from headwater.trainer.early import compile_run, validate_run
from headwater.trainer.job import Trainable


def check(
    args: argparse.Namespace, config: RunConfig | UserConfig, trainable: Trainable, batch_size: int
) -> int:
    """Compiles or validates as `args` say and prints what was found; returns the exit code."""
    open_console(config)
    act = compile_run if args.compile_only else validate_run
    Console(highlight=False).print(act(config.init, trainable, batch_size).render())
    return 0
