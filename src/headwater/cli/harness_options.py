"""Options of commands that evaluate on tasks. They replace the arguments of the callback in the params."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from headwater.config.base import Section
from headwater.config.document import Document
from headwater.config.origins import Origin, Origins
from headwater.config.run import AnySection, read_section

Options = Sequence[tuple[str, type, str]]
"""Name, type and help text of each option."""


def add_options(
    parser: argparse.ArgumentParser, options: Options, short: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Add the options of a harness to a parser.

    Args:
        parser: the parser.
        options: the options; the type `list` takes several words.
        short: further names of an option, by its name.
    """
    group = parser.add_argument_group("options of the harness")
    for name, kind, help_text in options:
        dashes = [f"--{name}", *(short or {}).get(name, ())]
        if kind is bool:
            group.add_argument(*dashes, action="store_true", default=None, dest=name, help=help_text)
        elif kind is list:
            group.add_argument(*dashes, nargs="+", dest=name, metavar="VALUE", help=help_text)
        else:
            group.add_argument(*dashes, type=kind, dest=name, metavar="VALUE", help=help_text)
    parser.add_argument("--keep_data_dir", action="store_true", help=argparse.SUPPRESS)


def read_options(
    kind: type[AnySection], key: str, options: Options, args: argparse.Namespace, given: Section | None
) -> AnySection:
    """Return the arguments of a harness: those of the params' callback, replaced by options.

    Args:
        kind: the class of the arguments.
        key: their key in the callback.
        options: the options.
        args: the command line.
        given: the arguments of the callback; `None` if the params lack the callback.

    Raises:
        ConfigError: if an option is not valid.
    """
    tree = {} if given is None else given.model_dump(mode="json", exclude_unset=True)
    values = {name: getattr(args, name) for name, _, _ in options}
    tree |= {name: value for name, value in values.items() if value is not None}
    place = Origins(Origin("options of the command", ()))
    arguments, _ = read_section(kind, Document({key: tree}, place), (key,))
    return arguments
