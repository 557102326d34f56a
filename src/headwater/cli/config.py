"""`headwater config`: write, check, convert, show and list params files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headwater.cli import config_init
from headwater.cli.arguments import add_params_arguments, read_params
from headwater.cli.files import write_text
from headwater.cli.output import open_console
from headwater.cli.parser import Parser
from headwater.config.conversion import convert_params
from headwater.config.files import find_params, shipped_params
from headwater.config.listing import describe_params, show_params
from headwater.config.run import load_params
from headwater.config.starter import schema_line
from headwater.core.errors import ConfigError
from headwater.trainer.zoo_job import count_parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater config`."""
    parser.description = "Write, check, convert, show and list params files."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    text = "ask questions about a run, and write a params file for it"
    init = commands.add_parser("init", help=text)
    init.set_defaults(parser=init, action=config_init.run)
    config_init.add_arguments(init)
    for name, action, text in (
        ("validate", run_validate, "check a params file and print its errors"),
        ("show", run_show, "print all values of a run, and where each of them comes from"),
        ("convert", run_convert, "convert a params file of an older form or release to the newest form"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(parser=command, action=action)
        if name == "convert":
            command.add_argument("--out", type=Path, required=True, metavar="NEW", help="the file to write")
        add_params_arguments(command, ("model",) if name == "convert" else _SHOWN)
    text = "list the shipped params files: name, family, parameters, data"
    listing = commands.add_parser("list", help=text)
    listing.add_argument(
        "word", nargs="?", default="", metavar="WORD", help="list only lines that contain WORD"
    )
    listing.add_argument("--sizes", action="store_true", help="also count the parameters of each model")
    listing.set_defaults(parser=listing, action=run_list)

    text = "write the JSON Schema of params files, with which an editor can complete and check them"
    schema = commands.add_parser("schema", help=text)
    schema.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    schema.set_defaults(parser=schema, action=run_schema)


_SHOWN = ("model", "model_dir", "learning_rate", "max_steps", "epochs", "batch_size", "data_dir", "num_csx")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    return int(args.action(args))


def run_validate(args: argparse.Namespace) -> int:
    """Check a params file and print that it is valid; return the exit code. Errors are raised."""
    config = read_params(args)
    open_console(config)
    print(f"{config.source} is valid")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print each value and its origin; return the exit code."""
    print("\n".join(show_params(find_params(args.params), args.overrides)))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write a params file in the newest form, print the keys without effect, and return the exit code.

    Raises:
        ConfigError: if the file is not valid, or the new file exists or cannot be written.
    """
    converted = convert_params(find_params(args.params), args.overrides)
    for notice in converted.notices:
        print(f"note: {notice}", file=sys.stderr)
    write_text(args.out, converted.text, mode="x", remedy="name a new file")
    load_params(args.out)
    print(f"wrote {args.out}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each shipped params file; return the exit code."""
    runs = {name: load_params(path) for name, path in shipped_params().items()}
    found = {
        name: run for name, run in runs.items() if args.word.lower() in describe_params(name, run).lower()
    }
    if not found:
        raise ConfigError(
            f"no line of the list contains {args.word!r}",
            where="command line: WORD",
            remedy="write another word, or leave it out to see the whole list",
        )
    for name, run in found.items():
        print(describe_params(name, run, count_parameters(run.init.model) if args.sizes else None))
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Print or write the JSON Schema of params files; return the exit code.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from headwater.config.json_schema import params_schema

    text = json.dumps(params_schema(), indent=1, ensure_ascii=False)
    if args.output is None:
        print(text)
        return 0
    write_text(args.output, f"{text}\n", remedy="name a file in a folder that exists")
    line = schema_line(args.output)
    print(f"wrote {args.output}; start params files in the same folder with this line:\n{line}")
    return 0
