"""Hugging Face's Trainer on several ranks, with DistributedDataParallel or streamed.

The rank with number 0 writes the seconds and the losses of all steps to a file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from transformers import TrainingArguments

import headwater
from benchmarks.options import positive
from benchmarks.systems.torch_ import build
from benchmarks.systems.trainer_ import Clock, Tokens
from benchmarks.workload import add_workload_arguments, workload_of
from headwater.core.buffers import tune_malloc
from headwater.integrations.transformers import StreamedTrainer


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--kind", choices=["plain", "tuned", "memory", "disk"], required=True)
    parser.add_argument("--ranks", type=positive, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the results, and the disk tier")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    workload = workload_of(args)
    on_disk = {"tier": "disk", "disk": args.folder / "store"} if args.kind == "disk" else {}
    is_streamed = args.kind in ("memory", "disk")
    if args.kind == "tuned":
        tune_malloc(keep=True)
    # This is before the arguments of the Trainer, which need to know the ranks.
    place = headwater.backend("CSX", num_csx=args.ranks, **on_disk) if is_streamed else "CPU"
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=workload.batch // args.ranks,
            max_steps=workload.warmup + workload.steps,
            learning_rate=3e-4,
            use_cpu=True,
            bf16=workload.dtype == "bf16",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = StreamedTrainer(
            model=build(workload),
            args=arguments,
            train_dataset=Tokens(workload),
            callbacks=[clock],
            backend=place,
        )
        trainer.train()
    if trainer.is_world_process_zero():
        found = {"times": clock.times[workload.warmup :], "losses": clock.losses}
        (args.folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
