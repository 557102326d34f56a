"""`headwater data`: turns texts and records into training samples."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from headwater.cli.files import read_text
from headwater.core.errors import ConfigError
from headwater.core.packages import importing
from headwater.core.units import format_bytes

if TYPE_CHECKING:
    from headwater.data.settings import NearDuplicates, PrepareSettings
    from headwater.data.statistics import Statistics

MODE_HELP = {
    "pretraining": "running text, with the loss on every next token",
    "fill_in_the_middle": "text with its middle moved to the end",
    "masked": "pairs of texts with masked tokens, for BERT",
    "span_corruption": "one text per line, for T5",
    "prompt_completion": "prompts and completions, with the loss on the completions",
    "chat": "conversations, with the loss on the assistant's turns",
    "summarization": "documents and summaries, with the loss on the summaries",
    "classification": "texts, or pairs of texts, with one class each",
    "preference": "a chosen and a rejected answer to each prompt, for DPO",
    "embedding_pairs": "questions, each with its passage and hard negatives, for DPR",
    "extractive_summarization": "sentences, labelled if they belong to the summary, for BERT",
    "image_text": "captions and conversations about images, for LLaVA",
}
"""Description of each mode. It is kept here so that `--help` works without the tokenizers library."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater data` to `parser`."""
    parser.usage = "headwater data [-h] INPUT [INPUT ...] --out DIR [--option VALUE ...]"
    parser.description = (
        "Prepare training data from texts and records: tokenize, pack, shuffle and split. "
        "`headwater data show DIR --out page.html` writes a page that shows prepared samples."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="txt, jsonl, json, csv (plain or .gz) or parquet file, or a folder of such files",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder")
    known = "; ".join(f"{name}: {mode}" for name, mode in MODE_HELP.items())
    parser.add_argument(
        "--mode", default="pretraining", choices=MODE_HELP, metavar="MODE", help=f"{known} (%(default)s)"
    )
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens per sample (%(default)s)")
    _add_tokenizer_arguments(parser)
    parser.add_argument(
        "--val_fraction", type=float, default=0.05, help="fraction of samples for validation (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random choices: shuffle, split, masks (%(default)s)"
    )
    parser.add_argument(
        "--samples_per_file", type=int, default=8192, help="samples per output file (%(default)s)"
    )
    parser.add_argument(
        "--processes",
        "--num_workers",
        dest="num_workers",
        type=int,
        default=os.cpu_count() or 1,
        help="worker processes (one per core)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the prepared data that DIR already holds"
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="with show: samples of each split on the page (%(default)s)"
    )
    _add_record_arguments(parser.add_argument_group("records"))
    modes = parser.add_argument_group("modes")
    _add_text_arguments(modes)
    _add_label_arguments(modes)
    _add_masking_arguments(modes)
    _add_image_arguments(parser.add_argument_group("images in texts"))


def _add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
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
        help="tokenizer.json, a SentencePiece model, BERT's vocab.txt, or a folder with one of the first two "
        "or with GPT-2's vocabulary and merges",
    )
    parser.add_argument(
        "--end_of_text",
        metavar="TOKEN",
        help="token after each document (default: the end-of-text token of the tokenizer)",
    )


def _add_record_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json_key",
        default="text",
        help="key of the text, in modes that read running text (%(default)s)",
    )
    group.add_argument(
        "--keys",
        nargs="+",
        default=[],
        metavar="FIELD=NAME",
        help="names that other fields have in the records, for example prompt=question",
    )
    _add_duplicate_arguments(group)
    group.add_argument(
        "--skip_bad_records",
        action="store_true",
        help="leave out and count records that cannot be used (default: stop at the first)",
    )
    group.add_argument(
        "--longer",
        choices=("skip", "cut"),
        default="skip",
        help="skip or cut records longer than a sample (%(default)s)",
    )


def _add_duplicate_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of duplicates. A preparation searches equal or similar ones, not both."""
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--deduplicate",
        action="store_true",
        help="leave out and count documents or records that are equal to an earlier one, apart from white "
        "space and upper and lower case",
    )
    kinds.add_argument(
        "--deduplicate_near",
        action="store_true",
        help="keep the first of each group of equal or similar documents or records; count the others (if "
        "the first is too long for a sample, --longer skip leaves out the whole group)",
    )
    group.add_argument(
        "--near_threshold",
        type=float,
        help="Jaccard similarity from which documents are similar: greater than 0, at most 1 (0.8)",
    )
    group.add_argument("--near_ngram", type=int, help="characters of the n-grams that are compared (13)")


def _add_text_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use_vsl",
        action="store_true",
        help="pack several texts into a sample; each attends only to itself",
    )
    group.add_argument(
        "--fim_rate",
        type=float,
        default=0.9,
        help="fraction of texts rearranged for fill in the middle (%(default)s)",
    )
    group.add_argument(
        "--spm_rate",
        type=float,
        default=0.5,
        help="fraction of the rearranged texts with the suffix first (%(default)s)",
    )
    group.add_argument(
        "--chat_template", type=Path, metavar="FILE", help="Jinja file (default: the tokenizer's template)"
    )
    group.add_argument(
        "--separator", help="text between a prompt and its completion, or a document and its summary"
    )
    group.add_argument(
        "--num_passages",
        type=int,
        default=2,
        help="passages per question, the right one included (%(default)s)",
    )


def _add_label_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of labelled texts."""
    group.add_argument(
        "--labels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of the classes in the order of their numbers (default: records have numbers)",
    )
    group.add_argument(
        "--max_cls_tokens", type=int, default=50, help="maximum sentences of a text (%(default)s)"
    )


def _add_masking_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of masked samples for BERT."""
    group.add_argument(
        "--masked_lm_prob", type=float, default=0.15, help="fraction of tokens to predict (%(default)s)"
    )
    group.add_argument(
        "--dynamic_mask",
        action="store_true",
        help="write unmasked tokens as CSV; training draws new masks in every epoch (BERT)",
    )
    group.add_argument(
        "--sentence_pairs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make each masked sample of two texts",
    )


def _add_image_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image_dir", type=Path, metavar="DIR", help="root folder of the images")
    group.add_argument("--num_features", type=int, help="positions that an image takes in a text")
    group.add_argument("--num_images", type=int, default=1, help="maximum images of a text (%(default)s)")
    group.add_argument(
        "--image_token_id", type=int, default=0, help="token at the positions of images (%(default)s)"
    )
    group.add_argument("--begin_of_text", metavar="TOKEN", help="token before each text (default: none)")


def run(args: argparse.Namespace) -> int:
    """Run `headwater data`: prepare data, or show prepared data, and print a summary; return the exit code.

    Raises:
        ConfigError: if a setting is out of range, or a library is not installed.
        DataError: if an input cannot be used.
    """
    with importing("headwater data", "data"):
        from headwater.data.prepare import prepare
    if args.inputs[0] == Path("show"):
        return _show(args)
    console = Console()
    statistics = prepare(
        args.inputs,
        args.out,
        _settings(args),
        num_workers=args.num_workers,
        overwrite=args.overwrite,
        progress=console.is_terminal,
    )
    console.print(summary(statistics, args.out))
    if statistics.too_long_records:
        print(_advice_on_length(statistics, args.longer), file=sys.stderr)
    return 0


def _advice_on_length(statistics: Statistics, longer: str) -> str:
    """Return a message that some records did not fit into a sample, and how to keep them."""
    found = f"{statistics.too_long_records:,} of {statistics.documents:,} records"
    cut = "" if longer == "cut" else ", or --longer cut to keep a part of each"
    return (
        f"note: {found} were left out, because they do not fit into {statistics.sequence_length} tokens; "
        f"write a larger --sequence_length{cut}"
    )


def _settings(args: argparse.Namespace) -> PrepareSettings:
    """Return the settings of a preparation. The libraries that it needs must be installed."""
    from headwater.data.modes import ModeOptions
    from headwater.data.settings import PrepareSettings
    from headwater.data.tokenizer import TrainBPE

    # As in T5: padding has id 0, and the end token has id 1.
    special = ("<|endoftext|>",) if args.mode != "span_corruption" else ("<pad>", "</s>", "<unk>", "<s>")
    return PrepareSettings(
        args.tokenizer or TrainBPE(args.vocab_size, special),
        args.sequence_length,
        val_fraction=args.val_fraction,
        seed=args.seed,
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
            labels=tuple(args.labels),
            sentence_pairs=args.sentence_pairs,
            masked_lm_prob=args.masked_lm_prob,
            dynamic_mask=args.dynamic_mask,
            image_dir=args.image_dir,
            num_features=args.num_features,
            num_images=args.num_images,
            image_token_id=args.image_token_id,
            begin_of_text=args.begin_of_text,
        ),
        deduplicate=_deduplicate(args),
        skip_bad_records=args.skip_bad_records,
    )


def _show(args: argparse.Namespace) -> int:
    from headwater.data.page import write_page

    if len(args.inputs) != 2:
        raise ConfigError(
            f"headwater data show takes one folder, got {len(args.inputs) - 1}",
            where="show",
            remedy="write headwater data show DIR --out page.html",
        )
    write_page(args.inputs[1], args.out, num_samples=args.samples)
    Console().print(f"{args.out}", soft_wrap=True)
    return 0


def _deduplicate(args: argparse.Namespace) -> bool | NearDuplicates:
    from headwater.data.settings import NearDuplicates

    options = {"threshold": args.near_threshold, "ngram": args.near_ngram}
    given = {name: value for name, value in options.items() if value is not None}
    if args.deduplicate_near:
        return NearDuplicates(**given)
    if given:
        option = f"near_{next(iter(given))}"
        what = f"--{option} has no effect without --deduplicate_near"
        raise ConfigError(what, where=option, remedy="add --deduplicate_near, or leave the option out")
    flag: bool = args.deduplicate
    return flag


def _keys(words: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for word in words:
        field, equals, name = word.partition("=")
        if not (field and equals and name):
            raise ConfigError(
                f"expected FIELD=NAME, got {word!r}",
                where="keys",
                remedy="write, for example, prompt=question",
            )
        pairs.append((field, name))
    return tuple(pairs)


def _template(path: Path | None) -> str | None:
    remedy = "name a UTF-8 file with a Jinja template"
    return None if path is None else read_text(path, "the chat template", remedy=remedy)


def summary(statistics: Statistics, folder: Path) -> Table:
    """Return the statistics of the data in `folder` as a table to print."""
    table = Table(title=f"Data in {folder}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut off cannot be copied
    records = {
        "left out: empty": statistics.empty_records,
        "left out: cannot be used": statistics.bad_records,
        "left out: duplicates": statistics.duplicate_records,
        "left out: too long": statistics.too_long_records,
        "cut: too long": statistics.cut_records,
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
        "unigram entropy": f"{statistics.unigram_entropy:.3f} nats per token",
        "training samples": f"{statistics.train_samples:,} of {statistics.sequence_length} tokens",
        "validation samples": f"{statistics.val_samples:,}",
    }
    if statistics.loss_tokens:
        rows["labels in the loss"] = f"{statistics.loss_tokens:,}"
        rows["padding"] = f"{statistics.padding_tokens / positions:.1%} of all positions"
    rows["data_dir"] = f"{folder / 'train'}, {folder / 'val'}"
    rows["tokenizer"] = str(folder / statistics.tokenizer_file)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
