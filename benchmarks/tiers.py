"""Time and disk traffic of a step with all, some or no stages on disk: `python -m benchmarks.tiers`.

One process has an engine for each division of the stages, and they take turns step by step, so that all see
the same machine. A step has few tokens, so that the computation does not hide the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.runner import print_table, save
from headwater.core.busy import BusyTimes, busy_times
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER
from headwater.core.units import GIB, MIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources, Trace
from headwater.store.update import Update
from headwater.stream.engine import Engine

_ADAMW = OptimizerSpec("AdamW", {"lr": 1e-4})
_VOCABULARY = 8000


def gpt(layers: int, width: int, sequence: int) -> nn.Module:
    """Return a GPT."""
    shape = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=_VOCABULARY, n_positions=sequence,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(shape)
    return model


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def open_engine(args: argparse.Namespace, share: float, disk: Path) -> Engine:
    """Return an engine that keeps this share of the stages in memory, and the others on disk."""
    torch.manual_seed(0)
    model, batch = gpt(args.layers, args.width, args.sequence), batch_of(args)

    def trace_for(size: int) -> Trace:
        return trace_step(model, batch[:size], Precision(), loss_function=loss)

    stages = len(trace_for(1).stages)
    plan = make_plan(
        PlanRequest(
            trace_for,
            batch_size=1,
            precision=Precision(),
            optimizer_state_bytes=8,
            resources=Resources(host_memory=16 * GIB, disk=disk, disk_bytes=32 * GIB),
            checkpoints=False,
            fixed=Fixed(
                tier="memory" if share == 1 else "disk",
                num_slabs=None if share == 1 else 4,
                stages_in_memory=None if share == 1 else round(share * stages),
                gradient_tier="memory",
            ),
        )
    )
    return Engine(model, plan, _ADAMW, loss_function=loss)


def batch_of(args: argparse.Namespace) -> torch.Tensor:
    """Return a batch of one sample."""
    return torch.randint(0, _VOCABULARY, (1, args.sequence), generator=torch.Generator().manual_seed(0))


def step_times(engine: Engine, args: argparse.Namespace, step: int) -> tuple[float, float, BusyTimes]:
    """Train one step; return its seconds, its CPU seconds, and the work that was recorded."""
    cpu, begin = time.process_time(), time.perf_counter_ns()
    engine.train_step([batch_of(args)], Update(step, {"lr": 1e-4}, None))
    # Writes that continue behind the step would otherwise slow down the next engine.
    engine.store.tier.settle()
    end = time.perf_counter_ns()
    times = busy_times(RECORDER.events(begin, end), begin, end, RECORDER.lane().thread)
    return 1e-9 * (end - begin), time.process_time() - cpu, times


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25, 0.0])
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with ExitStack() as opened:
        disk = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=".")))
        engines = {
            share: opened.enter_context(open_engine(args, share, disk / f"{number}"))
            for number, share in enumerate(args.shares)
        }
        found: dict[float, list[tuple[float, float, BusyTimes]]] = {share: [] for share in engines}
        for step in range(1, args.rounds + 2):
            for share, engine in engines.items():
                times = step_times(engine, args, step)
                if step > 1:  # the first step fills slabs and allocates memory
                    found[share].append(times)
    rows = [_row(share, engines[share], times) for share, times in found.items()]
    print_table(rows)
    save("tiers", rows)


def _row(share: float, engine: Engine, steps: list[tuple[float, float, BusyTimes]]) -> dict[str, object]:
    """Return the row of one engine: medians of its steps."""
    seconds, cpu_s, times = zip(*steps, strict=True)
    stages = len(engine.plan.trace.stages)
    kinds = ("disk read", "disk write")
    moved = {kind: [each.moved_bytes.get(kind, 0) / MIB for each in times] for kind in kinds}
    busy = [sum(each.busy_s.get(kind, 0.0) for kind in kinds) for each in times]
    return {
        "on_disk": f"{len(engine.plan.on_disk)} of {stages}",
        "step_s": round(statistics.median(seconds), 3),
        "best_s": round(min(seconds), 3),
        "cpu_s": round(statistics.median(cpu_s), 3),
        "read_MiB": round(statistics.median(moved["disk read"])),
        "written_MiB": round(statistics.median(moved["disk write"])),
        "disk_busy_s": round(statistics.median(busy), 3),
    }


if __name__ == "__main__":
    main()
