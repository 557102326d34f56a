"""Speed and memory of preparing text, and of reading samples: `python -m benchmarks.data --reading`.

Tokens per second of one process, alone and with the writing of samples; the peak of resident memory for
the same text once and ten times; and the time to read a sample with checksums and without, interleaved.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from benchmarks.runner import print_table, save
from headwater.data.checksums import MARK


def tokens_per_second(books: Path, tokenizer: Path) -> dict[str, object]:
    """Return the tokens per second of one core, and those of the tokenizers library."""
    from headwater.data.documents import find_inputs, read_pieces
    from headwater.data.tokenizer import load_tokenizer
    from headwater.data.words import TextEncoder

    loaded = load_tokenizer(tokenizer)
    texts = [piece.text for piece in read_pieces(find_inputs([books]))]
    speeds = {}
    encoder = TextEncoder(loaded)

    def library(part: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in loaded.encode_batch_fast(part, add_special_tokens=False)]

    for name, encode in (("tokenizers", library), ("Headwater", encoder)):
        start, count = time.process_time(), 0
        for place in range(0, len(texts), 16):
            count += sum(len(tokens) for tokens in encode(texts[place : place + 16]))
        speeds[name] = count / (time.process_time() - start)
    return {name: f"{speed / 1e6:.2f} M tokens/s/core" for name, speed in speeds.items()}


def preparation(books: Path, tokenizer: Path, copies: int, mode: str, folder: Path) -> dict[str, object]:
    """Measure a whole preparation, from files to files, in a separate process."""
    source = folder / f"text-{copies}"
    source.mkdir(exist_ok=True)
    for number in range(copies):
        for path in sorted(books.glob("*.txt.gz")):
            (source / f"{number}-{path.name.removesuffix('.gz')}").write_bytes(
                gzip.decompress(path.read_bytes())
            )
    places = map(str, (source, folder / f"{mode}-{copies}", tokenizer))
    words = [sys.executable, "-m", "benchmarks.preparation", *places, mode]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
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


def reading(compression: str | None, length: int, folder: Path) -> dict[str, object]:
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
    parser.add_argument("--books", type=Path, help="folder of txt.gz files")
    parser.add_argument("--tokenizer", type=Path, help="see headwater data --tokenizer")
    parser.add_argument("--reading", action="store_true", help="only read samples")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not args.reading and (args.books is None or args.tokenizer is None):
        parser.error("name --books and --tokenizer, or write --reading")
    with tempfile.TemporaryDirectory() as folder:
        cases = [(kind, length) for kind in ("gzip", None) for length in (128, 2048)]
        print_table([reading(kind, length, Path(folder)) for kind, length in cases])
    if args.reading:
        return
    print(tokens_per_second(args.books, args.tokenizer))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for copies in (1, 10):
            rows.append(preparation(args.books, args.tokenizer, copies, "pretraining", Path(folder)))
            print_table(rows[-1:])
    print_table(rows)
    print(save("data", rows))


if __name__ == "__main__":
    main()
