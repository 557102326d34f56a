"""Accuracy and speed of the search for near-duplicates: `python -m benchmarks.near_duplicates --books FOLDER`

The documents are passages of books, each with a copy in which some words are replaced. The exact Jaccard
similarity of all pairs says which documents have a similar one before them. A table shows how many of these
were left out. One process does all work.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from scipy.sparse import csr_matrix

from benchmarks.options import require_files
from benchmarks.runner import Row, print_table, save
from headwater.data.inputs import Inputs
from headwater.data.near_duplicates import find_kept
from headwater.data.raw_records import BadRecords
from headwater.data.settings import NearDuplicates

_LENGTH = 2000
"""Characters of a passage."""
_LIMITS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


def make_documents(books: Path, per_book: int) -> list[str]:
    """Return passages and a copy of each, in which up to 8 % of the words are replaced, in random order."""
    draw, passages = random.Random(0), []
    for path in sorted(books.glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        starts = draw.sample(range(0, len(text) - _LENGTH, _LENGTH), per_book)
        passages += [text[start : start + _LENGTH] for start in starts]
    copies = []
    for passage in passages:
        words, share = passage.split(" "), draw.uniform(0, 0.08)
        copies.append(" ".join(draw.choice(words) if draw.random() < share else word for word in words))
    return draw.sample([*passages, *copies], 2 * len(passages))


def similarity_before(documents: Sequence[str], ngram: int) -> npt.NDArray[np.float64]:
    """Return the highest exact Jaccard similarity of each document to one before it, [documents]."""
    numbers: dict[str, int] = {}
    places, columns = [], []
    for place, text in enumerate(documents):
        text = re.sub(r"\s+", " ", re.sub(f"[{re.escape(string.punctuation)}]", "", text.lower()).strip())
        grams = {text[start : start + ngram] for start in range(len(text) - ngram + 1)}
        columns += [numbers.setdefault(gram, len(numbers)) for gram in grams]
        places += [place] * len(grams)
    ones = np.ones(len(places), dtype=np.int32)
    rows = csr_matrix((ones, (places, columns)), shape=(len(documents), len(numbers)))
    shared, sizes = (rows @ rows.T).tocoo(), np.bincount(places, minlength=len(documents))
    earlier = shared.col < shared.row
    row, column, count = shared.row[earlier], shared.col[earlier], shared.data[earlier]
    highest = np.zeros(len(documents))
    np.maximum.at(highest, row, count / (sizes[row] + sizes[column] - count))
    return highest


def accuracy(highest: npt.NDArray[np.float64], kept: npt.NDArray[np.bool_]) -> list[Row]:
    """Return the share of documents left out, by their highest similarity to an earlier document."""
    table: list[Row] = []
    for low, high in zip(_LIMITS, (*_LIMITS[1:], 1.1), strict=True):
        inside = (highest >= low) & (highest < high)
        left_out = f"{np.mean(~kept[inside]):.1%}" if inside.any() else "-"
        table.append({"similarity from": low, "documents": int(inside.sum()), "left out": left_out})
    return table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True, help="folder of .txt.gz files")
    parser.add_argument("--per_book", type=int, default=200, help="passages of each book (%(default)s)")
    parser.add_argument("--threshold", type=float, default=0.8, help="Jaccard similarity (%(default)s)")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    require_files(parser, "--books", args.books, "*.txt.gz")
    near = NearDuplicates(args.threshold)
    documents = make_documents(args.books, args.per_book)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        inputs = Inputs([path], "documents", "text", Progress(disable=True))
        start = time.process_time()
        kept = find_kept(inputs, near, BadRecords(), Path(folder), 1)
        cpu_s = time.process_time() - start
    highest = similarity_before(documents, near.ngram)
    table = accuracy(highest, kept)
    print_table(table)
    similar = highest >= near.threshold
    summary: Row = {
        "recall": round(float(np.mean(~kept[similar])), 3),
        "precision": round(float(np.mean(similar[~kept])), 3),
        "lowest similarity left out": round(float(highest[~kept].min()), 3),
        "documents_per_cpu_second": round(len(documents) / cpu_s),
        "mb_per_cpu_second": round(sum(map(len, documents)) / cpu_s / 1e6, 2),
    }
    print_table([summary])
    print(save("near_duplicates", {"accuracy": table, "summary": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
