"""Speed and memory of preparing text, and of reading samples: `python -m benchmarks.data --reading`.

Tokens per second of one process, beside the tokenizers library in turn, and with the writing of samples; the
peak of resident memory for the same text once and ten times; and the time to read a sample with checksums and
without, interleaved.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from benchmarks.options import end_on_sigterm, require_files
from benchmarks.runner import Row, print_table, reason_of, save
from headwater.core.errors import HeadwaterError
from headwater.data.checksums import MARK
from headwater.data.tokenizer import load_tokenizer

_ROUNDS = 3
"""Rounds of the two tokenizers."""


def tokens_per_second(books: Path, tokenizer: Path) -> list[Row]:
    """Measure the tokens per second of one core, and those of the tokenizers library, in turn."""
    from headwater.data.documents import find_inputs, read_pieces
    from headwater.data.words import TextEncoder

    loaded = load_tokenizer(tokenizer)
    texts = [piece.text for piece in read_pieces(find_inputs([books]))]
    encoder = TextEncoder(loaded)

    def library(part: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in loaded.encode_batch_fast(part, add_special_tokens=False)]

    speeds: dict[str, list[float]] = {"tokenizers": [], "Headwater": []}
    for number in range(_ROUNDS):
        for name, encode in (("tokenizers", library), ("Headwater", encoder)):
            start, count = time.process_time(), 0
            for place in range(0, len(texts), 16):
                count += sum(len(tokens) for tokens in encode(texts[place : place + 16]))
            speeds[name].append(count / (time.process_time() - start))
            speed = f"{speeds[name][-1] / 1e6:.2f} M tokens per CPU second"
            print(f"round {number + 1}/{_ROUNDS}  {name:10s} {speed}", flush=True)
    return [
        {
            "tokenizer": name,
            "M tokens per CPU second": round(statistics.median(found) / 1e6, 2),
            "of tokenizers": round(
                statistics.median(a / b for a, b in zip(found, speeds["tokenizers"], strict=True)), 2
            ),
        }
        for name, found in speeds.items()
    ]


def preparation(books: Path, tokenizer: Path, copies: int, mode: str, folder: Path) -> Row:
    """Measure a whole preparation, from files to files, in a separate process.

    Raises:
        RuntimeError: if it fails; with the reason.
    """
    source = folder / f"text-{copies}"
    source.mkdir(exist_ok=True)
    for number in range(copies):
        for path in sorted(books.glob("*.txt.gz")):
            (source / f"{number}-{path.name.removesuffix('.gz')}").write_bytes(
                gzip.decompress(path.read_bytes())
            )
    places = map(str, (source, folder / f"{mode}-{copies}", tokenizer))
    words = [sys.executable, "-m", "benchmarks.preparation", *places, mode]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(reason_of(done.stderr, done.returncode))
    found = json.loads(done.stdout)
    return {
        "mode": mode,
        "text": f"{copies}x",
        "tokens": found["tokens"],
        "tokens_per_cpu_second": round(found["tokens"] / found["cpu_s"]),
        "wall_s": round(found["wall_s"], 1),
        "peak_mib": round(found["peak_bytes"] / 2**20),
    }


def remove_checksums(path: Path) -> None:
    """Remove the checksums of a file of samples, so that reading compares none."""
    with h5py.File(path, "r+") as file:
        del file.attrs[MARK]
        for samples in file.values():
            for name in [name for name in samples.attrs if name.startswith("checksums_")]:
                del samples.attrs[name]


def reading(compression: str | None, length: int, folder: Path) -> Row:
    """Measure processor time to read a sample, with checksums and without: the best of interleaved runs."""
    from headwater.data.reader import open_samples
    from headwater.data.sample_file import make_samples, write_datasets

    count, batch = (1 << 20) // length, 32
    tokens = np.random.default_rng(0).zipf(1.3, (count, length + 1)).clip(0, 49_999).astype(np.int32)
    sources = {}
    for name in ("with", "without"):
        path = folder / f"{name}-{compression}-{length}" / "data.h5"
        path.parent.mkdir()
        write_datasets(path, [{"data": make_samples(tokens)}], count, compression=compression)
        if name == "without":
            remove_checksums(path)
        sources[name] = open_samples([path.parent])
    best = dict.fromkeys(sources, float("inf"))
    for _ in range(15):
        for name, samples in sources.items():
            start = time.process_time()
            for first in range(0, count, batch):
                samples.__getitems__(range(first, min(first + batch, count)))
            best[name] = min(best[name], (time.process_time() - start) / count)
    return {
        "compression": compression or "none",
        "tokens": length,
        "us_without": round(best["without"] * 1e6, 1),
        "us_with": round(best["with"] * 1e6, 1),
        "cost": f"{best['with'] / best['without'] - 1:.1%}",
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, help="folder of .txt.gz files")
    parser.add_argument("--tokenizer", type=Path, help="see headwater data --tokenizer")
    parser.add_argument("--reading", action="store_true", help="only read samples")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if not args.reading and (args.books is None or args.tokenizer is None):
        parser.error("name --books and --tokenizer, or write --reading")
    if not args.reading:
        require_files(parser, "--books", args.books, "*.txt.gz")
        try:
            load_tokenizer(args.tokenizer)
        except HeadwaterError as error:
            parser.error(str(error))
    end_on_sigterm()
    read = measure_reading()
    if args.reading:
        print(save("data_reading", read))
        return 0
    encoded = tokens_per_second(args.books, args.tokenizer)
    print_table(encoded)
    prepared = measure_preparation(args.books, args.tokenizer)
    print(save("data", {"reading": read, "tokens": encoded, "preparation": prepared}))
    return int(any("failed" in row for row in prepared))


def measure_reading() -> list[Row]:
    """Measure the reading of samples, print the table and return it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        for compression in ("gzip", None):
            for length in (128, 2048):
                rows.append(reading(compression, length, Path(folder)))
                print(rows[-1], flush=True)
    print_table(rows)
    return rows


def measure_preparation(books: Path, tokenizer: Path) -> list[Row]:
    """Measure preparations of the text once and ten times, print the table and return it."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        for copies in (1, 10):
            try:
                rows.append(preparation(books, tokenizer, copies, "pretraining", Path(folder)))
            except RuntimeError as error:
                rows.append({"mode": "pretraining", "text": f"{copies}x", "failed": str(error)})
            print(rows[-1], flush=True)
    print_table(rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
