"""The workload of all benchmarks, a GPT of given shape on fixed random tokens, and its measurement."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Step = Callable[[int], float]
"""A function that runs one optimizer step and returns its loss."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A GPT-2 shape, a batch, a precision.

    With `micro_batch` 0 the system chooses; the run trains on `rotate` batches in turn.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    sequence: int = 512
    batch: int = 4
    dtype: str = "bf16"
    steps: int = 6
    warmup: int = 2
    rotate: int = 4

    def tokens(self, index: int) -> torch.Tensor:
        """Return the [batch, sequence + 1] token ids of step `index`."""
        generator = torch.Generator().manual_seed(1234 + index % self.rotate)
        return torch.randint(0, self.vocab, (self.batch, self.sequence + 1), generator=generator)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of `Workload`."""
    for field in dataclasses.fields(Workload):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload of these options."""
    return Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)})


def workload_options(workload: Workload) -> list[str]:
    """Return the options for `workload`."""
    return [f"--{key}={value}" for key, value in dataclasses.asdict(workload).items()]


def peak_rss_bytes() -> int:
    """Return the peak of resident memory of this process, without that of its parent."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None, "Linux tells"
    return int(peak[1]) << 10


def measure(workload: Workload, step: Step, **extra: object) -> None:
    """Run the warm-up and the counted steps, and print the measurements as one JSON line."""
    losses, times = [], []
    for index in range(workload.warmup + workload.steps):
        start = time.perf_counter()
        losses.append(step(index))
        times.append(time.perf_counter() - start)
    counted = times[workload.warmup :]
    result = {
        "first_step_s": times[0],
        "step_s": statistics.median(counted),
        "step_s_best": min(counted),
        "tokens_per_s": workload.tokens_per_step / statistics.median(counted),
        "peak_rss_bytes": peak_rss_bytes(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "load": os.getloadavg()[0],
        **extra,
    }
    print("RESULT " + json.dumps(result), flush=True)
