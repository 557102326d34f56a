"""`headwater index`: encode the passages of documents, and write them as an index."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.cli.arguments import add_override_options, positive, read_model_dir
from headwater.cli.retrieved import MACHINE, OWN
from headwater.core.errors import DataError, HeadwaterError
from headwater.core.patience import notice_if_long, print_notice
from headwater.core.units import counted
from headwater.data.documents import find_inputs
from headwater.data.passages import PASSAGE_WORDS
from headwater.data.staging import check_target, partial_folder
from headwater.retrieval.build import Texts, replaces
from headwater.retrieval.files import is_index
from headwater.trainer.retrieval import RetrieverRun, index_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater index`."""
    parser.description = (
        "Cut documents into passages, encode them with the passage encoder of a run (dpr), and write an "
        "index for `headwater search` and `headwater generate --index`. The same command continues after a "
        "kill or an error."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="TEXTS",
        help="txt, jsonl, json, csv (plain or .gz) or parquet file, or a folder of such files; a record may "
        "have a title",
    )
    parser.add_argument("--model_dir", required=True, type=Path, metavar="DIR", help="folder of the run")
    parser.add_argument("--out", required=True, type=Path, metavar="INDEX", help="folder of the index")
    parser.add_argument(
        "--passage_words",
        type=int,
        default=PASSAGE_WORDS,
        metavar="N",
        help="words of a passage; passages that are longer than the encoder reads are halved (%(default)s)",
    )
    parser.add_argument(
        "--json_key", default="text", metavar="KEY", help="key of the text in records (%(default)s)"
    )
    parser.add_argument(
        "--skip_bad_records",
        action="store_true",
        help="leave out and count records that cannot be used (default: stop at the first)",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=64,
        metavar="N",
        help="passages in one pass over the weights, if memory suffices (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the index that --out already has")
    parser.add_argument("--checkpoint_path", type=Path, metavar="PATH", help="checkpoint to use (the newest)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json (the one in the folder of the run)"
    )
    add_override_options(parser, MACHINE, without=OWN)


def run(args: argparse.Namespace) -> int:
    """Write the index; return the exit code."""
    _check_out(args.out, args.inputs)
    texts = Texts(find_inputs(args.inputs), args.passage_words, args.json_key, args.skip_bad_records)
    # Before the encoder is opened, which takes a while.
    check_target(args.out, replace=replaces(args.out, args.overwrite))
    config = read_model_dir(args.model_dir, args.overrides)
    retriever = RetrieverRun.find(config, args.checkpoint_path)
    with _noted_progress(args.out), notice_if_long("opening the encoder") as activity:

        def show_progress(count: int) -> None:
            activity.name = f"encoding passages: {count} done"

        built = index_texts(
            retriever,
            args.out,
            texts,
            tokenizer=args.tokenizer,
            batch_size=args.batch_size,
            overwrite=args.overwrite,
            on_progress=show_progress,
        )
    if built.bad_records:
        print(f"left out: {counted(built.bad_records, 'record', 'records')} that cannot be used")
    print(f"{counted(built.manifest.num_passages, 'passage', 'passages')} written to {args.out}")
    return 0


def _check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Check that the index is not written into a folder of inputs.

    Raises:
        DataError: if it is: the files of the index would be inputs of the next run.
    """
    for folder in inputs:
        if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise DataError(
                f"expected a folder outside of the inputs, found one below {folder}",
                where=f"--out {out}",
                remedy="name a folder that is not below an input folder",
            )


@contextmanager
def _noted_progress(out: Path) -> Iterator[None]:
    """Print after an error that the same command continues, if some passages are written already."""
    try:
        yield
    except HeadwaterError:
        partial = partial_folder(out)
        if is_index(partial):
            print_notice(
                f"note: the passages written so far are kept in {partial}; the same command continues"
            )
        raise
