"""Cost of the recorder: `python -m benchmarks.recorder`.

One process trains a model, and the recorder is on in every second step. The cost is the difference of the
medians, as a share of a step. Neighbouring steps see the same machine. On a busy machine the difference is
noise; then `counted_percent` is the better number: the events of a step times the cost of one, and the time
in which they are read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.runner import is_part, print_table, save
from headwater.core.busy import busy_times
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER
from headwater.core.units import GIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.store.update import Update
from headwater.stream.engine import Engine

_ADAMW = OptimizerSpec("AdamW", {"lr": 1e-4})


def gpt() -> tuple[nn.Module, torch.Tensor]:
    """Return a GPT of 12 blocks of width 256, and a batch of 2,048 tokens."""
    shape = GPT2Config(
        n_layer=12, n_embd=256, n_head=4, vocab_size=8192, n_positions=512, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(shape), torch.randint(0, 8192, (4, 512))


def tiny_stages() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of 200 tiny stages, and a batch."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(200))), torch.randn(8, 16)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss of the batch."""
    if batch.is_floating_point():
        result: torch.Tensor = model(batch).square().mean()
        return result
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def measure(name: str, disk: Path | None, steps: int) -> dict[str, object]:
    """Train one of the models, and return the medians with and without the recorder."""
    torch.manual_seed(0)
    model, batch = gpt() if name == "GPT 12×256" else tiny_stages()

    def trace_for(size: int) -> Trace:
        return trace_step(model, batch[:size], Precision(), loss_function=loss)

    plan = make_plan(
        PlanRequest(
            trace_for,
            batch_size=len(batch),
            precision=Precision(),
            optimizer_state_bytes=8,
            resources=Resources(host_memory=8 * GIB, disk=disk, disk_bytes=8 * GIB if disk else None),
            fixed=Fixed(micro_batch_size=len(batch), tier="disk" if disk else "memory"),
        )
    )
    times: dict[bool, list[float]] = {True: [], False: []}
    cpu_times: dict[bool, list[float]] = {True: [], False: []}
    events, reading = [], []
    with Engine(model, plan, _ADAMW, seed=0, loss_function=loss) as engine:
        for step in range(1, 2 * steps + 5):
            RECORDER.is_on = step % 2 == 0
            start, cpu = time.perf_counter_ns(), time.process_time()
            engine.train_step([batch], Update(step, {"lr": 1e-4}))
            end = time.perf_counter_ns()
            if step > 4:
                times[RECORDER.is_on].append(1e-9 * (end - start))
                cpu_times[RECORDER.is_on].append(time.process_time() - cpu)
            if RECORDER.is_on:
                begin = time.perf_counter()
                found = RECORDER.events(start, end)
                busy_times(found, start, end, RECORDER.lane().thread)
                reading.append(time.perf_counter() - begin)
                events.append(len(found))
    counted_s = statistics.median(events) * 1e-6 * span_us() / 2 + statistics.median(reading)
    on, off = statistics.median(times[True]), statistics.median(times[False])
    # The difference of neighbours: the machine is as busy in one as in the other.
    differences = [a - b for a, b in zip(times[True], times[False], strict=True)]
    return {
        "model": f"{name}, {'disk' if disk else 'memory'}",
        "step_ms": round(1e3 * off, 2),
        "with_recorder_ms": round(1e3 * on, 2),
        "cost_percent": round(100 * statistics.median(differences) / off, 2),
        "best_percent": round(100 * (min(times[True]) / min(times[False]) - 1), 2),
        "cpu_percent": round(
            100 * (statistics.median(cpu_times[True]) / statistics.median(cpu_times[False]) - 1), 2
        ),
        "counted_percent": round(100 * counted_s / min(times[False]), 3),
        "events": int(statistics.median(events)),
        "load": round(os.getloadavg()[0], 1),
    }


def span_us(count: int = 100_000) -> float:
    """Return the microseconds of one span inside other work."""
    with RECORDER.span("compute"):
        start = time.perf_counter()
        for _ in range(count):
            with RECORDER.span("wait", "stage"):
                pass
        return 1e6 * (time.perf_counter() - start) / count


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps with the recorder, and without it")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    print(f"one span: {span_us():.2f} µs")
    rows = []
    for name in ("GPT 12×256", "200 tiny stages"):
        rows.append(measure(name, None, args.steps))
        print(rows[-1], flush=True)
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
            rows.append(measure(name, Path(folder), args.steps))
        print(rows[-1], flush=True)
    print_table(rows)
    part = is_part(parser, args, "steps")
    print(save("recorder", {"span_us": span_us(), "rows": rows}, part=part))


if __name__ == "__main__":
    main()
