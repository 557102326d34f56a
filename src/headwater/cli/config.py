"""`headwater config`: check params files."""

from __future__ import annotations

import argparse

from headwater.cli.arguments import add_params_arguments, read_params
from headwater.cli.output import open_console
from headwater.cli.parser import Parser
from headwater.config import shipped_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater config`."""
    parser.description = "Check params files."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    validate = commands.add_parser("validate", help="read a params file and say what is wrong with it")
    validate.set_defaults(parser=validate, action=run_validate)
    add_params_arguments(validate)
    listing = commands.add_parser("list", help="name the params files that ship with the package")
    listing.set_defaults(parser=listing, action=run_list)


def run(args: argparse.Namespace) -> int:
    """Does what is asked for; returns the exit code."""
    return int(args.action(args))


def run_validate(args: argparse.Namespace) -> int:
    """Reads a params file; returns the exit code."""
    config = read_params(args)
    open_console(config)
    print(f"{config.source} is valid")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Prints the names of the params files that ship; returns the exit code."""
    print("\n".join(shipped_params()))
    return 0
