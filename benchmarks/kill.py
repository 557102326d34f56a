"""Runs that are killed at random instants and resumed: `python -m benchmarks.kill --kills 50`.

Losses and last checkpoint of every resumed run must have the same bits as those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import end_on_sigterm, positive
from benchmarks.runner import is_part, print_table, save
from headwater.data.assets import sample_text
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE

SHAPE = [
    "--trainer.init.model.hidden_size=96",
    "--trainer.init.model.num_heads=4",
    "--trainer.init.model.dropout_rate=0.1",
    "--trainer.init.checkpoint.steps=7",
    "--trainer.init.loop.max_steps=40",
    "--trainer.init.loop.eval_frequency=20",
    "--trainer.fit.train_dataloader.num_workers=0",
]


def write_data(folder: Path) -> None:
    """Write the training data of the tiny GPT."""
    prepare([sample_text()], folder, PrepareSettings(TrainBPE(2048), sequence_length=128))


def command(data: Path, model_dir: Path, tier: str) -> list[str]:
    """Return the command of a run of the tiny GPT."""
    return [
        sys.executable, "-m", "headwater", "fit", "gpt/tiny", f"--model_dir={model_dir}", *SHAPE,
        f"--trainer.fit.train_dataloader.data_dir={data}/train",
        f"--trainer.fit.val_dataloader.data_dir={data}/val",
        f"--trainer.validate.val_dataloader.data_dir={data}/val",
        f"--trainer.init.backend.tier={tier}",
        f"--trainer.init.backend.disk.path={model_dir}/store",
    ]  # fmt: skip


def outcome(model_dir: Path) -> tuple[list[tuple[int, float, float]], dict[str, bytes]]:
    """Return losses and gradient norms by step, and the tensors of the last checkpoint."""
    lines = (model_dir / "history.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [(r["step"], r["loss"], r["gradient_norm"]) for r in records if r["kind"] == "train"]
    last = max(model_dir.glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
    return losses, {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kills", type=positive, default=50, help="kills of all tiers together (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", nargs="+", choices=["memory", "disk"], default=["memory", "disk"])
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="headwater-kill-") as name:
        report = measure(args, Path(name))
    print_table([{"tier": tier, **counts} for tier, counts in report.items()])
    part = is_part(parser, args, "kills", "tiers")
    print(save("kill", report, part=part))
    return int(any(counts["equal"] < counts["kills"] for counts in report.values()))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, int]]:
    """Kill and resume runs of each tier; return the numbers of kills and of equal results, by tier."""
    data = folder / "data"
    write_data(data)
    rng = random.Random(args.seed)
    report: dict[str, dict[str, int]] = {}
    for tier in args.tiers:
        start = time.perf_counter()
        subprocess.run(command(data, folder / tier, tier), check=True, capture_output=True)
        length_s = time.perf_counter() - start
        expected = outcome(folder / tier)
        equal = attempts = 0
        for _ in range(max(1, args.kills // len(args.tiers))):
            victim = folder / "victim"
            shutil.rmtree(victim, ignore_errors=True)
            process = subprocess.Popen(
                command(data, victim, tier), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(rng.uniform(0, length_s))
            process.kill()
            process.wait()
            subprocess.run(command(data, victim, tier), check=True, capture_output=True)
            equal += outcome(victim) == expected
            attempts += 1
            print(f"{tier}: {equal} of {attempts} resumed to the same bits", flush=True)
        report[tier] = {"kills": attempts, "equal": equal}
    return report


if __name__ == "__main__":
    sys.exit(main())
