"""`headwater evaluate`: cross-entropy, perplexity and bits per byte of texts."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwater.cli.arguments import USAGE, add_model_arguments, read_model
from headwater.cli.evaluation_ranks import run_evaluation
from headwater.core.files import check_place, replace_file
from headwater.data.codec import Codec
from headwater.evaluation.texts import TextScore, read_texts, score_texts
from headwater.fabric.fabric import Fabric
from headwater.trainer.inference import Inference, open_scorer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater evaluate`."""
    parser.description = (
        "Print the cross-entropy, perplexity and bits per byte of a language model on texts, by subset. "
        "PARAMS may also be a folder of the transformers library, with config.json and weights."
    )
    parser.usage = f"headwater evaluate [-h] {USAGE} --text FILE [FILE ...]"
    add_model_arguments(parser)
    parser.add_argument(
        "--text",
        required=True,
        nargs="+",
        type=Path,
        metavar="FILE",
        help="texts: .jsonl with a text in each record, or a file with one text; .gz is decompressed",
    )
    parser.add_argument(
        "--text_field", default="text", metavar="KEY", help="key of the text in a record (%(default)s)"
    )
    parser.add_argument(
        "--subset_field",
        default="meta.pile_set_name",
        metavar="KEY",
        help="key of the name of the subset; dots lead into nested records (%(default)s)",
    )
    parser.add_argument("--output_path", type=Path, metavar="FILE", help="also write the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate texts and print a table; return the exit code."""
    config = read_model(args)
    if args.output_path is not None:
        check_place(args.output_path, expected="a file")

    def evaluate(codec: Codec, fabric: Fabric) -> dict[str, TextScore]:
        texts = [text for path in args.text for text in read_texts(path, args.text_field, args.subset_field)]
        inference = Inference(args.batch_size, args.max_sequence_length, args.checkpoint_path)
        with open_scorer(config, inference, fabric) as scorer:
            return score_texts(scorer, codec, texts)

    return run_evaluation(config, args, evaluate, functools.partial(_report, args))


def _report(args: argparse.Namespace, found: dict[str, TextScore]) -> int:
    """Print the results, write their file, and return the exit code."""
    _print(found)
    if args.output_path is not None:
        content = {name: _numbers(score) for name, score in found.items()}
        replace_file(args.output_path, f"{json.dumps(content, indent=2)}\n".encode())
    return 0


def _numbers(score: TextScore) -> dict[str, float]:
    return {
        "texts": score.texts,
        "tokens": score.tokens,
        "bytes": score.num_bytes,
        "cross_entropy": score.cross_entropy,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def _print(found: dict[str, TextScore]) -> None:
    table = Table("subset", "texts", "tokens", "bytes", "cross-entropy", "perplexity", "bits per byte")
    for name, score in found.items():
        exact = (f"{score.texts:,}", f"{score.tokens:,}", f"{score.num_bytes:,}")
        table.add_row(
            name,
            *exact,
            f"{score.cross_entropy:.4f}",
            f"{score.perplexity:.4g}",
            f"{score.bits_per_byte:.4f}",
        )
    Console(highlight=False).print(table)
