"""`headwater data`: text files to HDF5 samples."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from headwater.core.errors import DataError
from headwater.core.units import format_bytes

if TYPE_CHECKING:
    from headwater.data.statistics import Statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater data`."""
    parser.description = "Make training data of text: tokenize, pack, shuffle, split."
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="txt or jsonl file, plain or .gz, or folder of them",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens of a sample (%(default)s)")
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--vocab_size",
        type=int,
        default=4096,
        help="train a byte-level BPE tokenizer of this size (%(default)s)",
    )
    tokenizer.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or folder with one or with GPT-2's two files",
    )
    parser.add_argument(
        "--end_of_text", metavar="TOKEN", help="token after each document (the tokenizer's own)"
    )
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share for validation (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of shuffle and split (%(default)s)")
    parser.add_argument("--json_key", default="text", help="key of the text in jsonl lines (%(default)s)")
    parser.add_argument("--samples_per_file", type=int, default=8192, help="samples in a file (%(default)s)")
    parser.add_argument(
        "--num_workers", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data prepared in DIR before")


def run(args: argparse.Namespace) -> int:
    """Prepares the data and prints what it is; returns the exit code.

    Raises:
        ConfigError: for a setting out of range.
        DataError: for input that cannot be used.
    """
    try:
        from headwater.data.prepare import prepare
        from headwater.data.tokenizer import TrainBPE
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed", remedy="pip install 'headwater[data]'") from error
    console = Console()
    statistics = prepare(
        args.inputs,
        args.out,
        tokenizer=args.tokenizer or TrainBPE(args.vocab_size),
        sequence_length=args.sequence_length,
        val_fraction=args.val_fraction,
        seed=args.seed,
        num_workers=args.num_workers,
        samples_per_file=args.samples_per_file,
        json_key=args.json_key,
        end_of_text=args.end_of_text,
        overwrite=args.overwrite,
        progress=console.is_terminal,
    )
    console.print(summary(statistics, args.out))
    return 0


def summary(statistics: Statistics, folder: Path) -> Table:
    """The statistics as a table to print."""
    table = Table(title=f"Data in {folder}", title_justify="left", show_header=False)
    rows = {
        "documents": f"{statistics.documents:,}",
        "text": format_bytes(statistics.text_bytes),
        "tokens": f"{statistics.tokens:,} ({statistics.bytes_per_token:.2f} bytes each)",
        "vocabulary": f"{statistics.vocab_size:,}",
        "unigram entropy": f"{statistics.unigram_entropy:.3f} nats a token",
        "training samples": f"{statistics.train_samples:,} of {statistics.sequence_length} tokens",
        "validation samples": f"{statistics.val_samples:,}",
        "data_dir": f"{folder / 'train'}, {folder / 'val'}",
        "tokenizer": str(folder / statistics.tokenizer_file),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
