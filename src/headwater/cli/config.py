"""`headwater config`: write, check, convert, show and list params files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Literal

from headwater.cli import config_init
from headwater.cli.arguments import add_params_arguments, read_params
from headwater.cli.output import open_console
from headwater.cli.parser import Parser
from headwater.config import RunConfig, find_params, load_params, shipped_params
from headwater.config.conversion import convert_params
from headwater.config.listing import describe_params, show_params
from headwater.config.starter import schema_line
from headwater.core.errors import ConfigError
from headwater.trainer.zoo_job import meta_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater config`."""
    parser.description = "Write, check, convert, show and list params files."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    text = "ask for what a run needs, and write a params file that trains"
    init = commands.add_parser("init", help=text, description=f"{text[0].upper()}{text[1:]}.")
    init.set_defaults(parser=init, action=config_init.run)
    config_init.add_arguments(init)
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
    listing.add_argument("--sizes", action="store_true", help="also count the parameters of each model")
    listing.set_defaults(parser=listing, action=run_list)

    text = "write the JSON Schema of params files, by which an editor completes and checks them"
    schema = commands.add_parser("schema", help=text, description=f"{text[0].upper()}{text[1:]}.")
    schema.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    schema.set_defaults(parser=schema, action=run_schema)


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
    write_text(args.out, converted.text, mode="x", remedy="name a new file")
    load_params(args.out)
    print(f"wrote {args.out}")
    return 0


def write_text(path: Path, text: str, *, mode: Literal["x", "w"], remedy: str) -> None:
    """Write a file that the user has named.

    Raises:
        ConfigError: if the file cannot be written; with mode `x`, also if there is one already.
    """
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}", where=str(path), remedy=remedy
        ) from error


def _parameters(run: RunConfig) -> int:
    return sum(value.numel() for value in meta_model(run.init.model).parameters())


def run_list(args: argparse.Namespace) -> int:
    """Prints a line for each params file that ships; returns the exit code."""
    runs = {name: load_params(path) for name, path in shipped_params().items()}
    found = {
        name: run for name, run in runs.items() if args.word.lower() in describe_params(name, run).lower()
    }
    if not found:
        raise ConfigError(
            f"no params file that ships has {args.word!r} in its line", remedy="see headwater config list"
        )
    for name, run in found.items():
        print(describe_params(name, run, _parameters(run) if args.sizes else None))
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Prints or writes the JSON Schema of params files; returns the exit code.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from headwater.config.json_schema import params_schema

    text = json.dumps(params_schema(), indent=1, ensure_ascii=False)
    if args.output is None:
        print(text)
        return 0
    write_text(args.output, f"{text}\n", mode="w", remedy="name a file in a folder that exists")
    print(f"wrote {args.output}; begin params files beside it with this line:\n{schema_line(args.output)}")
    return 0
