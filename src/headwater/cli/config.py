"""`headwater config`: check, convert, show and list params files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headwater.cli.arguments import add_params_arguments, read_params
from headwater.cli.output import open_console
from headwater.cli.parser import Parser
from headwater.config import find_params, load_params, shipped_params
from headwater.config.conversion import convert_params
from headwater.config.listing import describe_params, show_params
from headwater.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater config`."""
    parser.description = "Check, convert, show and list params files."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for name, action, text in (
        ("validate", run_validate, "read a params file and say what is wrong with it"),
        ("show", run_show, "print each value that a run would have, and where it comes from"),
        ("convert", run_convert, "write a params file of an older form or release in the newest form"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(parser=command, action=action)
        if name == "convert":
            command.add_argument("--out", type=Path, required=True, metavar="NEW", help="the file to write")
        add_params_arguments(command, ("model",) if name == "convert" else _SHOWN)
    text = "list the params files that ship: name, family, parameters, data"
    listing = commands.add_parser("list", help=text, description=f"{text[0].upper()}{text[1:]}.")
    listing.add_argument("word", nargs="?", default="", metavar="WORD", help="only those whose line has it")
    listing.set_defaults(parser=listing, action=run_list)


_SHOWN = ("model", "model_dir", "learning_rate", "max_steps", "epochs", "batch_size", "data_dir", "num_csx")


def run(args: argparse.Namespace) -> int:
    """Does what is asked for; returns the exit code."""
    return int(args.action(args))


def run_validate(args: argparse.Namespace) -> int:
    """Reads a params file; returns the exit code."""
    config = read_params(args)
    open_console(config)
    print(f"{config.source} is valid")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Prints each value and where it comes from; returns the exit code."""
    print("\n".join(show_params(find_params(args.params), args.overrides)))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Writes a params file in the newest form, and prints what had no effect; returns the exit code.

    Raises:
        ConfigError: if the file is wrong, or the new one is there already or cannot be written.
    """
    converted = convert_params(find_params(args.params), args.overrides)
    for notice in converted.notices:
        print(f"note: {notice}", file=sys.stderr)
    try:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(converted.text)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}", where=str(args.out), remedy="name a new file"
        ) from error
    load_params(args.out)
    print(f"wrote {args.out}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Prints a line for each params file that ships; returns the exit code."""
    lines = [describe_params(name, path) for name, path in shipped_params().items()]
    found = [line for line in lines if args.word.lower() in line.lower()]
    if not found:
        raise ConfigError(
            f"no params file that ships has {args.word!r} in its line", remedy="see headwater config list"
        )
    print("\n".join(found))
    return 0
