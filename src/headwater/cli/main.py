"""The command `headwater`: runs one of its commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.files import lookup_errors, unencodable
from headwater.core.signals import speaks_for_all
from headwater.core.spins import never_spin
from headwater.core.terminal import outlive_terminal, silence
from headwater.fabric.parent import find_parent
from headwater.fabric.report import report

if TYPE_CHECKING:
    from headwater.appliance.remote.address import Address

COMMANDS = {
    "fit": ("headwater.cli.fit", "train a model, or resume its training"),
    "validate": ("headwater.cli.validate", "evaluate a checkpoint"),
    "evaluate": ("headwater.cli.evaluate", "measure perplexity and bits per byte on texts"),
    "lm_eval": ("headwater.cli.lm_eval", "evaluate a model on tasks of lm-evaluation-harness"),
    "bigcode_eval": ("headwater.cli.bigcode_eval", "evaluate a model on tasks that ask for programs"),
    "plan": ("headwater.cli.plan", "show the plan, memory and step time of a run, without training"),
    "generate": ("headwater.cli.generate", "generate text with a trained model"),
    "index": ("headwater.cli.index", "make an index of the passages of documents"),
    "search": ("headwater.cli.search", "find the passages of an index that fit a question"),
    "input_worker": (
        "headwater.cli.input_worker",
        "read the data of a run for its ranks, also on other hosts",
    ),
    "serve": ("headwater.cli.serve", "answer requests to language models over HTTP"),
    "batch": ("headwater.cli.batch", "answer the requests of a file with language models"),
    "data": ("headwater.cli.data", "prepare training data from text"),
    "checkpoint": ("headwater.cli.checkpoint", "inspect, convert, export and import checkpoints"),
    "config": ("headwater.cli.config", "write, check, convert and list params files"),
    "jobs": ("headwater.cli.jobs", "submit jobs to the queue of this machine, list and cancel them"),
    "scaling": ("headwater.cli.scaling", "train a family of sizes and fit the power law of its losses"),
    "board": ("headwater.cli.board", "serve a web page that shows runs and jobs, live"),
    "conform": ("headwater.cli.conform", "compare a model with plain PyTorch, bit for bit"),
    "ray": ("headwater.cli.ray", "train on a Ray cluster, or write a manifest for one on Kubernetes"),
    "demo": ("headwater.cli.demo", "train a small GPT on a shipped book"),
}
"""Module and help text of each command."""

_WIDTH = 80
"""Characters of a line of a file or pipe."""
_LITTLE_AT_A_TIME = frozenset({"generate", "search", "serve", "batch", "bigcode_eval"})
"""Commands whose passes over a model compute few tokens; see `never_spin`."""


class Command(Protocol):
    """The interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code.

    Args:
        argv: the words after `headwater`; `sys.argv[1:]` if `None`.

    Returns:
        0: success. 1: the command failed while it ran. 2: the command line, a file or the machine is not
        suitable. 130: interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        prepare_process()
        if not _LITTLE_AT_A_TIME.isdisjoint(words[:1]):  # before the command imports torch
            never_spin()
    return guarded(lambda: _run(words, is_process=argv is None))


def prepare_process() -> None:
    """Prepare a process that is one command: its end, and what it prints."""
    # First, so that a rank exits with its launcher even while modules are imported.
    find_parent()
    outlive_terminal()
    forget_useless_width()
    escape_unprintable()


def _run(words: list[str], *, is_process: bool) -> int:
    """Run a command line and return the exit code.

    Args:
        words: the words after `headwater`.
        is_process: the command is this whole process, and not a call in a program.
    """
    address, words = _without_address(words)
    args = _parsed(words)
    if args is None:
        return 0
    args.words, args.is_process, args.appliance = words, is_process, address
    require_working_directory()
    return int(args.run(args))


def require_working_directory() -> None:
    """Check that the working directory exists. Without it a library of torch ends the process.

    Raises:
        ConfigError: if the working directory was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the working directory was deleted",
            where=os.environ.get("PWD"),
            remedy="change to a folder that exists: cd",
        ) from error


def forget_useless_width() -> None:
    """Remove `COLUMNS` from the environment if it is 0, or if it is small and stdout is not a terminal.

    Tables lose columns where they have less than 80 characters, and with 0 nothing is printed at all. A file
    or a pipe has no width to keep to.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and (
        int(columns[:6]) == 0 or (int(columns[:6]) < _WIDTH and not sys.stdout.isatty())
    ):
        del os.environ["COLUMNS"]


def escape_unprintable() -> None:
    """Print characters that the encoding of stdout does not have as escapes such as `\\xfc`.

    Python does so on stderr. On stdout it would raise an error, and a run would end because of a message.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def guarded(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code. Errors that a user can cause are printed as messages."""
    from headwater.cli.output import print_error

    try:
        with lookup_errors():
            return run()
    except (HeadwaterError, UnicodeEncodeError) as raised:
        error = raised if isinstance(raised, HeadwaterError) else unencodable(raised)
        # If a launcher has started this process, the launcher prints the error, once for all ranks.
        return 1 if report(error) else print_error(error)
    except KeyboardInterrupt:
        if speaks_for_all():
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe (`headwater … | head`)
        # Otherwise Python would fail once more when it flushes stdout at its exit.
        silence(sys.stdout.fileno())
        return INTERRUPTED


def _without_address(words: list[str]) -> tuple[Address | None, list[str]]:
    """Return the appliance that a command line names, if it does, and the rest of the command line."""
    from headwater.cli.appliance_option import REMOTE_IF_ASKED, is_asked, refuse_other_commands, take_address

    address, rest = take_address(words)
    name = next((word for word in rest if not word.startswith("-")), None)
    if name in COMMANDS:
        refuse_other_commands(name, words)
    return (None if name in REMOTE_IF_ASKED and not is_asked(words) else address), rest


def _parsed(words: list[str]) -> argparse.Namespace | None:
    """Parse a command line. If it names no command, print the help and return `None`."""
    from headwater.cli.parser import Parser, suggestion

    parser = Parser(
        prog="headwater",
        description="Train PyTorch models that are larger than memory. Weights stay in RAM or on disk, and "
        "are copied to the device a few layers at a time.",
        epilog="`headwater demo` trains a first model. `headwater COMMAND --help` shows the options of a "
        "command.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('headwater')}")
    # Only for the help: `_without_address` has removed the option.
    parser.add_argument(
        "--appliance",
        metavar="ADDRESS",
        help="run fit, validate, plan or jobs on another machine: ssh://[user@]host[:port]",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        listed = f"available: {', '.join(COMMANDS)}"
        raise ConfigError(
            f"unknown command {name!r}", where="command line", remedy=suggestion(name, COMMANDS, listed)
        )
    for known, (module, help_text) in COMMANDS.items():
        subparser = commands.add_parser(known, help=help_text)
        if known == name:  # import only the module of the chosen command
            command: Command = importlib.import_module(module)
            subparser.set_defaults(parser=subparser, run=command.run)
            command.add_arguments(subparser)
    end = words.index("--") if "--" in words else len(words)
    args: argparse.Namespace
    args, rest = parser.parse_known_args(words[:end])
    if name is None:
        parser.print_help()
        return None
    if "flags" in args:
        from headwater.cli.arguments import overrides

        args.overrides = [*args.flags, *overrides(args.parser, rest)]
    elif rest:
        raise args.parser.unknown(rest[0])
    if "command" in args:
        args.command = words[end + 1 :]  # the words of another program, which are not parsed
    elif words[end + 1 :]:
        raise args.parser.unknown(words[end + 1])
    return args
