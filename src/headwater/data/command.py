"""`headwater data`: text files to HDF5 samples."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from headwater.core.errors import ConfigError, DataError
from headwater.core.units import format_bytes

if TYPE_CHECKING:
    from headwater.data.statistics import Statistics

MODE_HELP = {
    "pretraining": "next words of running text",
    "fill_in_the_middle": "text whose middle comes last",
    "masked": "pairs of texts with tokens to guess, for BERT",
    "span_corruption": "a text a line, for T5",
    "prompt_completion": "prompts, with the loss on what follows",
    "chat": "conversations, with the loss on the assistant's turns",
    "summarization": "documents, with the loss on their summaries",
    "preference": "a better and a worse answer to each prompt, for DPO",
    "embedding_pairs": "questions with a right passage and wrong ones, for DPR",
    "extractive_summarization": "sentences, of which some make the summary, for BERT",
    "image_text": "captions and conversations about images, for LLaVA",
}
"""What each mode makes; here, so that `--help` needs no tokenizer library."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater data`."""
    parser.description = (
        "Make training data of text and records: tokenize, pack, shuffle, split. "
        "`headwater data show DIR --out page.html` shows what was made."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="txt, jsonl, json, csv (plain or .gz) or parquet file, or folder of them",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    modes = "; ".join(f"{name}: {mode}" for name, mode in MODE_HELP.items())
    parser.add_argument(
        "--mode", default="pretraining", choices=MODE_HELP, metavar="MODE", help=f"{modes} (%(default)s)"
    )
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
        help="tokenizer.json, or folder with one or with GPT-2's two files, or BERT's vocab.txt",
    )
    parser.add_argument(
        "--end_of_text", metavar="TOKEN", help="token after each document (the tokenizer's own)"
    )
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share for validation (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of shuffle and split (%(default)s)")
    parser.add_argument("--samples_per_file", type=int, default=8192, help="samples in a file (%(default)s)")
    parser.add_argument(
        "--processes",
        "--num_workers",
        dest="num_workers",
        type=int,
        default=os.cpu_count() or 1,
        help="worker processes (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data prepared in DIR before")
    parser.add_argument("--samples", type=int, default=8, help="of show: samples on the page (%(default)s)")
    _add_mode_arguments(parser)


def _add_mode_arguments(parser: argparse.ArgumentParser) -> None:
    records = parser.add_argument_group("records")
    records.add_argument(
        "--json_key", default="text", help="field of the text, where running text is wanted (%(default)s)"
    )
    records.add_argument(
        "--keys", nargs="+", default=[], metavar="FIELD=NAME", help="names of other fields, prompt=question"
    )
    records.add_argument(
        "--skip_bad_records", action="store_true", help="leave out and count records that cannot be used"
    )
    records.add_argument(
        "--longer", choices=("skip", "cut"), default="skip", help="records that are too long (%(default)s)"
    )
    options = parser.add_argument_group("modes")
    options.add_argument(
        "--use_vsl", action="store_true", help="several texts in a sample, each seeing itself alone"
    )
    options.add_argument("--fim_rate", type=float, default=0.9, help="share of texts turned (%(default)s)")
    options.add_argument("--spm_rate", type=float, default=0.5, help="of these suffix first (%(default)s)")
    options.add_argument(
        "--chat_template", type=Path, metavar="FILE", help="Jinja file (the tokenizer's own)"
    )
    options.add_argument("--separator", help="text between a prompt or document and what follows")
    options.add_argument("--num_passages", type=int, default=2, help="of a question (%(default)s)")
    options.add_argument("--max_cls_tokens", type=int, default=50, help="sentences of a text (%(default)s)")
    options.add_argument("--masked_lm_prob", type=float, default=0.15, help="share guessed (%(default)s)")
    options.add_argument(
        "--dynamic_mask", action="store_true", help="leave the masks to the training: CSV for BERT"
    )
    options.add_argument(
        "--sentence_pairs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="masked samples are two texts",
    )
    images = parser.add_argument_group("images in texts")
    images.add_argument("--image_dir", type=Path, metavar="DIR", help="folder below which the images are")
    images.add_argument("--num_features", type=int, help="places that an image takes in a text")
    images.add_argument("--num_images", type=int, default=1, help="of a text at most (%(default)s)")
    images.add_argument(
        "--image_token_id", type=int, default=0, help="token in the places of images (%(default)s)"
    )
    images.add_argument("--begin_of_text", metavar="TOKEN", help="token before each text (none)")


def run(args: argparse.Namespace) -> int:
    """Prepares the data and prints what it is; returns the exit code.

    Raises:
        ConfigError: for a setting out of range.
        DataError: for input that cannot be used.
    """
    try:
        from headwater.data.modes import ModeOptions
        from headwater.data.prepare import prepare
        from headwater.data.tokenizer import TrainBPE
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed", remedy="pip install 'headwater[data]'") from error
    if args.inputs[0] == Path("show"):
        return _show(args)
    console = Console()
    special = ("<|endoftext|>",) if args.mode != "span_corruption" else ("<pad>", "</s>", "<unk>", "<s>")
    statistics = prepare(
        args.inputs,
        args.out,
        tokenizer=args.tokenizer or TrainBPE(args.vocab_size, special),
        sequence_length=args.sequence_length,
        val_fraction=args.val_fraction,
        seed=args.seed,
        num_workers=args.num_workers,
        samples_per_file=args.samples_per_file,
        json_key=args.json_key,
        end_of_text=args.end_of_text,
        mode=args.mode,
        options=ModeOptions(
            longer=args.longer,
            keys=_keys(args.keys),
            use_vsl=args.use_vsl,
            fim_rate=args.fim_rate,
            spm_rate=args.spm_rate,
            chat_template=_template(args.chat_template),
            separator=args.separator,
            num_passages=args.num_passages,
            max_cls_tokens=args.max_cls_tokens,
            sentence_pairs=args.sentence_pairs,
            masked_lm_prob=args.masked_lm_prob,
            dynamic_mask=args.dynamic_mask,
            image_dir=args.image_dir,
            num_features=args.num_features,
            num_images=args.num_images,
            image_token_id=args.image_token_id,
            begin_of_text=args.begin_of_text,
        ),
        skip_bad_records=args.skip_bad_records,
        overwrite=args.overwrite,
        progress=console.is_terminal,
    )
    console.print(summary(statistics, args.out))
    return 0


def _show(args: argparse.Namespace) -> int:
    from headwater.data.page import write_page

    if len(args.inputs) != 2:
        raise ConfigError(
            "one folder is shown", where="show", remedy="headwater data show DIR --out page.html"
        )
    write_page(args.inputs[1], args.out, num_samples=args.samples)
    Console().print(f"{args.out}", soft_wrap=True)
    return 0


def _keys(words: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for word in words:
        field, equals, name = word.partition("=")
        if not (field and equals and name):
            raise ConfigError(f"{word!r} is not FIELD=NAME", where="keys", remedy="write prompt=question")
        pairs.append((field, name))
    return tuple(pairs)


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"chat template cannot be read: {error}"
        raise DataError(what, where=str(path), remedy="name a file with a Jinja template") from error


def summary(statistics: Statistics, folder: Path) -> Table:
    """The statistics as a table to print."""
    table = Table(title=f"Data in {folder}", title_justify="left", show_header=False)
    records = {
        "left out, empty": statistics.empty_records,
        "left out, cannot be used": statistics.bad_records,
        "left out, too long": statistics.too_long_records,
        "cut, too long": statistics.cut_records,
    }
    positions = (statistics.train_samples + statistics.val_samples) * statistics.sequence_length
    rows = {
        "mode": statistics.mode,
        "documents": f"{statistics.documents:,}",
        **{name: f"{count:,}" for name, count in records.items() if count},
        **({"images": f"{statistics.images:,}"} if statistics.images else {}),
        "text": format_bytes(statistics.text_bytes),
        "tokens": f"{statistics.tokens:,} ({statistics.bytes_per_token:.2f} bytes each)",
        "vocabulary": f"{statistics.vocab_size:,}",
        "unigram entropy": f"{statistics.unigram_entropy:.3f} nats a token",
        "training samples": f"{statistics.train_samples:,} of {statistics.sequence_length} tokens",
        "validation samples": f"{statistics.val_samples:,}",
    }
    if statistics.loss_tokens:
        rows["labels in the loss"] = f"{statistics.loss_tokens:,}"
        rows["filled up"] = f"{statistics.padding_tokens / positions:.1%} of all positions"
    rows["data_dir"] = f"{folder / 'train'}, {folder / 'val'}"
    rows["tokenizer"] = str(folder / statistics.tokenizer_file)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
