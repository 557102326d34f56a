"""`headwater search`: print the passages of an index that fit a question best."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from headwater.cli.retrieved import add_machine_options, add_retriever_arguments, headlines
from headwater.trainer.retrieval import open_retriever


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater search`."""
    parser.description = (
        "Print the passages of an index whose vectors have the largest inner products with that of a "
        "question."
    )
    parser.add_argument("index", type=Path, metavar="INDEX", help="folder that headwater index has written")
    parser.add_argument("question", metavar="QUESTION", help="the question")
    add_retriever_arguments(parser)
    add_machine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the passages; return the exit code."""
    with open_retriever(
        args.index, encoder_dir=args.encoder_dir, changes=args.overrides, batch_size=1
    ) as retriever:
        hits = retriever.retrieve([args.question], args.passages)[0]
    for line, hit in zip(headlines(hits), hits, strict=True):
        print(f"{line}\n{textwrap.indent(hit.passage.text, '    ')}\n")
    return 0
