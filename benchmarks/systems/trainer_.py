"""Hugging Face's Trainer over transformers' GPT-2 in memory, with the fused AdamW and without clipping.

Its losses are smaller than those of other systems by 1 / sequence: it divides the sum by the number of all
labels, and the model has no prediction for the first one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.systems.torch_ import build
from benchmarks.workload import Workload, add_workload_arguments, print_measured, workload_of


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """The batches of a run one after the other, sample by sample."""

    def __init__(self, workload: Workload) -> None:
        steps = range(workload.warmup + workload.steps)
        self._samples = torch.cat([workload.tokens(step)[:, :-1] for step in steps])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._samples[index], "labels": self._samples[index]}


class InOrder(Trainer):  # type: ignore[misc]  # transformers has no types
    """A trainer that does not shuffle, so that it sees the same batches as the other systems."""

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Records the seconds between the ends of steps, and their losses."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []
        self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.times.append(now - self._start)
        self._start = now

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    return parser


def main() -> None:
    workload = workload_of(make_parser().parse_args())
    model, clock = build(workload), Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=workload.batch,
            max_steps=workload.warmup + workload.steps,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=0.0,
            use_cpu=True,
            bf16=workload.dtype == "bf16",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            optim="adamw_torch_fused",
        )
        InOrder(model=model, args=arguments, train_dataset=Tokens(workload), callbacks=[clock]).train()
    print_measured(workload, clock.times, clock.losses, parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
