"""A family on whole books: `python -m benchmarks.scaling --books FOLDER --folder DIR`.

Six sizes are trained with 20 tokens per parameter. The power law through the first five predicts the sixth.
Steps that are done already are not repeated, so the program can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.options import end_on_sigterm, require_files
from benchmarks.runner import save

VOCABULARY, LENGTH = 512, 64
WIDTHS, DEPTH = (16, 32, 48, 64, 80, 96), 2
QUICK_WIDTHS = (16, 24, 32, 40, 48)
"""Widths with a tenth of the FLOPs; five sizes are the fewest that determine a law and test it."""
HEADS, QUICK_HEADS = 2, 4
"""Heads at width 32. Widths are multiples of the size of a head."""
PARAMS = """\
# The base of the family: the size whose learning rate was chosen.
extends: gpt/tiny
trainer:
  init:
    model: {{vocab_size: {vocabulary}, hidden_size: 32, num_hidden_layers: {depth}, num_heads: {heads},
             max_position_embeddings: {length}}}
    schedulers:
    - CosineDecayLR: {{initial_learning_rate: {rate}, end_learning_rate: {final_rate}, total_iters: 100}}
    loop: {{max_steps: 100}}
    logging: {{log_steps: 200}}
    callbacks: []
  fit:
    train_dataloader: &train
      data_dir: {data}/train
      batch_size: 16
    val_dataloader: &val
      <<: *train
      data_dir: {data}/val
      batch_size: 256
      shuffle: false
  validate:
    val_dataloader: *val
"""


def headwater(*words: object) -> None:
    """Run a command of headwater. If it fails, end with its exit code; it has printed its error."""
    print("headwater", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "headwater", *map(str, words)])
    if done.returncode:
        print(f"headwater {words[0]} failed with exit code {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True, help="folder with texts, .txt or .txt.gz")
    parser.add_argument("--folder", type=Path, required=True, help="folder for data, runs and the law")
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="rate of the base (%(default)s)")
    parser.add_argument("--parametrization", choices=["mup", "standard"], default="mup")
    parser.add_argument(
        "--quick", action="store_true", help=f"widths {', '.join(map(str, QUICK_WIDTHS))}, for a trial"
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    require_files(parser, "--books", args.books, "*.txt*")
    end_on_sigterm()
    folder = args.folder.absolute()
    name = args.parametrization + ("_quick" if args.quick else "")
    data, family = folder / "data", folder / f"family_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        sizes = ("--vocab_size", VOCABULARY, "--sequence_length", LENGTH)
        headwater("data", *sorted(args.books.glob("*.txt*")), *sizes, "--out", data)
    if not family.exists():
        base = folder / f"base_{name}.yaml"
        rates = {"rate": args.learning_rate, "final_rate": args.learning_rate / 10}
        widths, heads = (QUICK_WIDTHS, QUICK_HEADS) if args.quick else (WIDTHS, HEADS)
        shape = {"vocabulary": VOCABULARY, "length": LENGTH, "depth": DEPTH, "heads": heads}
        base.write_text(PARAMS.format(data=data, **shape, **rates))
        family_of = ("--widths", *widths, "--depths", DEPTH, "--parametrization", args.parametrization)
        headwater("scaling", "write", base, "--out", family, *family_of)
    begin = time.monotonic()
    headwater("scaling", "run", family)
    seconds = time.monotonic() - begin
    headwater("scaling", "fit", family)
    report = json.loads((family / "scaling.json").read_text())
    print(
        save(
            f"scaling_{name}",
            {"learning_rate": args.learning_rate, "training_s": round(seconds), **report},
        )
    )


if __name__ == "__main__":
    main()
