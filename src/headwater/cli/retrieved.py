"""Arguments of commands that find passages in an index, and the lines that they print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headwater.cli.arguments import add_override_options, positive
from headwater.cli.files import read_text
from headwater.config.overrides import SHORT_NAMES
from headwater.core.errors import ConfigError
from headwater.retrieval.index import Hit
from headwater.retrieval.prompt import PassageTemplate
from headwater.retrieval.retriever import PASSAGES

MACHINE = frozenset({"target_device", "device_memory", "host_memory", "disk"})
"""The options of params files that have an effect on the encoder of an index."""

OWN = frozenset({"model_dir", "model", "batch_size", "checkpoint_path"})
"""Options of `headwater index`, `serve` and `batch` that these commands define; they set no params."""


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of params files that choose the device and the memory."""
    add_override_options(parser, MACHINE, without=SHORT_NAMES.keys() - MACHINE)


def machine_changes(changes: Sequence[str]) -> list[str]:
    """Return those changes of a language model, as `key=value`, that its retriever has too.

    The retriever is another run, whose model and data do not have the other keys.
    """
    keys = MACHINE.union(*(SHORT_NAMES[name] for name in MACHINE))
    return [change for change in changes if change.removeprefix("--").partition("=")[0] in keys]


def add_retriever_arguments(group: argparse._ActionsContainer) -> None:
    """Add the arguments that say how passages are found."""
    group.add_argument(
        "--passages",
        type=positive,
        metavar="K",
        help=f"number of passages to find ({PASSAGES}, or all if the index has fewer)",
    )
    group.add_argument(
        "--encoder_dir",
        type=Path,
        metavar="DIR",
        help="folder of the run that made the index (its place at that time)",
    )


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that put passages before a prompt."""
    group = parser.add_argument_group("passages before the prompt")
    group.add_argument(
        "--index",
        type=Path,
        metavar="INDEX",
        help="put the passages of this index that fit the prompt best before it (see headwater index)",
    )
    add_retriever_arguments(group)
    group.add_argument(
        "--template",
        type=Path,
        metavar="FILE",
        help="text with {passages} and {prompt} (passages, an empty line, prompt)",
    )


def check_index_arguments(args: argparse.Namespace) -> None:
    """Raise if an argument of `add_index_arguments` has no effect.

    Raises:
        ConfigError: if such an argument is given without --index.
    """
    for option in ("passages", "encoder_dir", "template"):
        if args.index is None and getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} needs --index", where=f"--{option}", remedy="add --index FOLDER, or remove it"
            )


def read_template(args: argparse.Namespace) -> PassageTemplate:
    """Return the template that the arguments name, or the default one.

    Raises:
        ConfigError: if the file cannot be read, or is not a template.
    """
    if args.template is None:
        return PassageTemplate()
    remedy = "name a UTF-8 file with {passages} and {prompt}"
    text = read_text(args.template, "the template", remedy=remedy)
    # Editors end files with a newline, which would separate the prompt from its continuation.
    return PassageTemplate(text.removesuffix("\n"))


def headlines(hits: Sequence[Hit]) -> list[str]:
    """Return a line for each passage: number, score, title and source."""
    return [
        f"[{number}] {hit.score:.3f}  {hit.passage.title}{'  ' if hit.passage.title else ''}"
        f"({hit.passage.source})"
        for number, hit in enumerate(hits, start=1)
    ]
