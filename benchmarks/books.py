"""The tiny GPT on whole books: `python -m benchmarks.books --books FOLDER --folder DIR --steps 200 1600`.

The last part of each book is held out. A run of `gpt/tiny` for each number of steps trains on the first part.
The output compares its losses on the held-out part with those of token frequencies and of frequencies of
token pairs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from benchmarks.runner import is_part, print_table, save

HELD_OUT = 0.05
"""Fraction of the characters of each book that is held out."""
VOCABULARY, LENGTH = 2048, 128
WARMUP = 50
"""Steps until the learning rate is highest, in `gpt/tiny`."""


def headwater(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "headwater", *map(str, words)], check=True)


def divided(books: Path, folder: Path) -> None:
    """Write the beginning and the end of each book."""
    for path in sorted(books.glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        place = text.index("\n\n", round(len(text) * (1 - HELD_OUT)))
        for part, content in (("begin", text[:place]), ("end", text[place:])):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / path.name.removesuffix(".gz")).write_text(content)


def prepared(folder: Path) -> None:
    """Return samples of both parts, with the same tokenizer."""
    common = ("--sequence_length", LENGTH, "--val_fraction", 0, "--processes", 1)
    learnt, held_out = folder / "data", folder / "held_out"
    if not learnt.exists():
        headwater("data", folder / "begin", "--out", learnt, "--vocab_size", VOCABULARY, *common)
    if not held_out.exists():
        tokenizer = learnt / "tokenizer.json"
        headwater("data", folder / "end", "--out", held_out, "--tokenizer", tokenizer, *common)


def pairs(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return every token to predict, and the token before it."""
    found = []
    for path in sorted((folder / "train").glob("*.h5")):
        with h5py.File(path) as file:
            rows = file["data"][:].astype(np.int64)
        counted = rows[:, 1] == 1
        found.append(np.stack([rows[:, 0][counted], rows[:, 2][counted]]))
    before, after = np.concatenate(found, axis=1)
    return before, after


def frequencies(folder: Path) -> dict[str, float]:
    """Return the cross-entropy of held-out tokens, predicted by frequencies in the first part, in nats.

    The count of a pair is smoothed: its number of occurrences plus `k` times the frequency of its second
    token. `k` is the value that is best on the held-out part.
    """
    before, after = pairs(folder / "data")
    asked, right = pairs(folder / "held_out")
    shares = np.bincount(after, minlength=VOCABULARY) + 0.5
    shares = shares / shares.sum()
    counts = np.bincount(before * VOCABULARY + after, minlength=VOCABULARY**2)
    counts = counts.reshape(VOCABULARY, VOCABULARY)
    seen = counts.sum(1)
    bigrams = min(
        -np.log((counts[asked, right] + k * shares[right]) / (seen[asked] + k)).mean()
        for k in 2.0 ** np.arange(12)
    )
    return {"unigrams": float(-np.log(shares[right]).mean()), "bigrams": float(bigrams)}


def run(folder: Path, steps: int) -> dict[str, object]:
    """Train up to a number of steps; continue an earlier run."""
    model_dir = folder / f"run_{steps}"
    rates = [
        {"LinearLR": {"initial_learning_rate": 0.0, "end_learning_rate": 3e-3, "total_iters": WARMUP}},
        {
            "CosineDecayLR": {
                "initial_learning_rate": 3e-3,
                "end_learning_rate": 3e-4,
                "total_iters": steps - WARMUP,
            }
        },
    ]
    keys = {
        "init.model_dir": model_dir,
        "init.schedulers": json.dumps([{"SequentialLR": {"schedulers": rates}}]),
        "init.loop": json.dumps({"max_steps": steps, "eval_frequency": steps // 3}),
        "fit.train_dataloader.data_dir": folder / "data/train",
        "fit.val_dataloader.data_dir": folder / "held_out/train",
        "validate.val_dataloader.data_dir": folder / "held_out/train",
    }
    start = time.monotonic()
    headwater("fit", "gpt/tiny", *(f"trainer.{key}={value}" for key, value in keys.items()))
    seconds = time.monotonic() - start
    records = [json.loads(line) for line in (model_dir / "history.jsonl").read_text().splitlines()]
    losses = {
        kind: [each["loss"] for each in records if each["kind"] == kind] for kind in ("train", "validate")
    }
    last = losses["train"][-20:]
    return {
        "steps": steps,
        "train_loss": round(sum(last) / len(last), 3),
        "validation_loss": round(losses["validate"][-1], 3),
        "seconds": round(seconds),
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True, help="folder of txt.gz files")
    parser.add_argument("--folder", type=Path, required=True, help="folder for data and runs")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[200, 1600], help="steps of each run (%(default)s)"
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    divided(args.books, args.folder)
    prepared(args.folder)
    trivial = frequencies(args.folder)
    print({name: round(value, 3) for name, value in trivial.items()})
    rows = [run(args.folder, steps) for steps in args.steps]
    print_table(rows)
    part = is_part(parser, args, "steps")
    print(save("books", {"rows": rows, "cross_entropy_of_frequencies": trivial}, part=part))


if __name__ == "__main__":
    main()
