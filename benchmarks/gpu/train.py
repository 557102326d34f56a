"""One system in one process: `python -m benchmarks.gpu.train --system headwater --shape 1.3B`.

Prints a line of JSON: speed, memory and losses, and those that Headwater's plan has predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.gpu.shapes import Load, add_load_arguments, load_of
from benchmarks.gpu.systems import SYSTEMS
from benchmarks.resident import peak_rss_bytes
from benchmarks.runner import Row

RESULT = "RESULT "
"""The beginning of the line with the measurements."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_load_arguments(parser)
    parser.add_argument("--system", choices=SYSTEMS, default="headwater")
    parser.add_argument("--disk", type=Path, help="folder of a disk tier")
    return parser


def measured(name: str, load: Load, disk: Path | None = None) -> Row:
    """Train with a system, and return its row."""
    on_gpu = load.device == "cuda"
    with ExitStack() as stack:
        begin_s = time.perf_counter()
        system = SYSTEMS[name](load, stack, disk)
        ready_s = time.perf_counter() - begin_s
        if on_gpu:  # the weights were drawn on the GPU
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses, times = [], []
        for index in range(load.warmup + load.steps):
            begin_s = time.perf_counter()
            losses.append(system.step(index))
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin_s)
        step_s = statistics.median(times[load.warmup :])
        row: Row = {
            "tokens_per_s": round(load.tokens_per_step / step_s, 1),
            "model_tflops": round(load.flops_per_step / step_s / 1e12, 3),
            "step_s": step_s,
            "steps_s": [round(each, 4) for each in times],
            "ready_s": round(ready_s, 1),
            "host_bytes": peak_rss_bytes(),
            "device_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
            "losses": losses,
        }
    return row | system.remarks | _compared(system.predicted, row)


def _compared(predicted: dict[str, object], row: Row) -> Row:
    """Return the predictions of the plan, and their ratios to the measurements."""
    if not predicted:
        return {}
    ratios = {}
    for key in ("step_s", "device_bytes", "host_bytes"):
        found, promised = row[key], predicted[key]
        if isinstance(found, int | float) and isinstance(promised, int | float) and found and promised:
            ratios[key] = round(promised / found, 3)
    return {"predicted": predicted, "predicted_over_measured": ratios}


def main() -> None:
    args = make_parser().parse_args()
    print(RESULT + json.dumps(measured(args.system, load_of(args), args.disk)), flush=True)


if __name__ == "__main__":
    main()
