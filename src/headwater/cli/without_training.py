"""`--compile_only` and `--validate_only`: compile or check a run without training."""

from __future__ import annotations

import argparse

from rich.console import Console

from headwater.cli.output import open_console
from headwater.config.run import RunConfig
from headwater.config.user import UserConfig
from headwater.trainer.job import Trainable
from headwater.trainer.without_training import compile_run, validate_run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that set the keys `compile_only` and `validate_only`. They are collected in `flags`."""
    instead = parser.add_mutually_exclusive_group()
    for name, help_text in (
        ("compile_only", "do not train; write the plan, the graphs and a report of operators"),
        (
            "validate_only",
            "do not train; check that model, loss, optimizer and the shapes of a batch fit together",
        ),
    ):
        key = f"trainer.init.backend.{name}=true"
        instead.add_argument(
            f"--{name}", action="append_const", dest="flags", const=key, default=[], help=help_text
        )


def asked_for(config: RunConfig | UserConfig) -> bool:
    """True if the params or the command line ask for `compile_only` or `validate_only`."""
    return config.init.backend.compile_only or config.init.backend.validate_only


def compile_or_validate(config: RunConfig | UserConfig, trainable: Trainable, batch_size: int) -> int:
    """Compile or validate a run as its params ask, print the report, and return the exit code.

    Args:
        config: the run.
        trainable: the model with its loss, batch and optimizer.
        batch_size: samples of a batch.
    """
    open_console(config)
    act = compile_run if config.init.backend.compile_only else validate_run
    Console(highlight=False).print(act(config.init, trainable, batch_size).render(), markup=False)
    return 0
