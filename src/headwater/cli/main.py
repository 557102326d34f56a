"""`headwater`: finds the command, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Protocol

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.signals import speaks_for_all
from headwater.fabric.parent import find_parent
from headwater.fabric.report import report
from headwater.trainer.interrupt import EXIT_CODE

COMMANDS = {
    "fit": ("headwater.cli.fit", "train a model, from its last checkpoint on if there is one"),
    "validate": ("headwater.cli.validate", "evaluate a checkpoint"),
    "plan": ("headwater.cli.plan", "show how a model would be trained here, without training it"),
    "generate": ("headwater.cli.generate", "continue a text with a trained model"),
    "data": ("headwater.data.command", "make training data of text"),
    "checkpoint": ("headwater.cli.checkpoint", "look into, export and import checkpoints"),
    "config": ("headwater.cli.config", "check params files"),
    "jobs": ("headwater.cli.jobs", "queue jobs for the CSXs of this machine, list and cancel them"),
    "conform": ("headwater.cli.conform", "compare a model with plain PyTorch, bit for bit"),
    "ray": ("headwater.cli.ray", "train on a Ray cluster, or write a manifest for one on Kubernetes"),
    "demo": ("headwater.cli.demo", "train a small GPT on a book that ships with the package"),
}
"""Module of each command, and what it does."""


class Command(Protocol):
    """What the module of a command holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does what is asked for; returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, this process's own if none is given; returns its exit code.

    0: done. 1: failed on the way. 2: something in the command line, a file or the machine does not fit.
    130: interrupted.
    """
    if argv is None:
        find_parent()
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(words, is_process=argv is None))


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`, with errors that a user can cause printed as messages."""
    from headwater.cli.output import print_error

    try:
        return run()
    except HeadwaterError as error:
        if report(error):
            return 1  # the launcher says it, once for all ranks
        return print_error(error)
    except KeyboardInterrupt:
        if speaks_for_all():
            print("interrupted", file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CODE


def _run(words: list[str], *, is_process: bool) -> int:
    from headwater.cli.parser import Parser, suggestion

    parser = Parser(prog="headwater", description="Train PyTorch models of any size by weight streaming.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('headwater')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        listed = f"commands are: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}", remedy=suggestion(name, COMMANDS, listed))
    for known, (module, help_text) in COMMANDS.items():
        subparser = commands.add_parser(known, help=help_text)
        if known == name:  # a module is imported for its own command only
            command: Command = importlib.import_module(module)
            subparser.set_defaults(parser=subparser, run=command.run)
            command.add_arguments(subparser)
    end = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:end])
    if name is None:
        parser.print_help()
        return 0
    if "flags" in args:
        from headwater.cli.arguments import overrides

        args.overrides = [*args.flags, *overrides(args.parser, rest)]
    elif rest:
        raise args.parser.unknown(rest[0])
    if "command" in args:
        args.command = words[end + 1 :]  # another program's, not to be understood here
    elif words[end + 1 :]:
        raise args.parser.unknown(words[end + 1])
    args.words, args.is_process = words, is_process
    return int(args.run(args))
