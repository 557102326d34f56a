"""Time and disk traffic of a step with all, some or no stages on disk: `python -m benchmarks.tiers`.

One process has an engine for each division of the stages, and they take turns step by step, so that all see
the same machine. A step has few tokens, so that the computation does not hide the disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.options import end_on_sigterm, fraction, positive
from benchmarks.runner import Row, is_part, print_table, save
from headwater.core.busy import BusyTimes, busy_times
from headwater.core.errors import HeadwaterError
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER
from headwater.core.units import GIB, MIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.store.update import Update
from headwater.stream.engine import Engine

_ADAMW = OptimizerSpec("AdamW", {"lr": 1e-4})
_VOCABULARY = 8000

Step = tuple[float, float, BusyTimes]
"""Seconds and CPU seconds of a step, and the work that was recorded."""


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


def step_times(engine: Engine, args: argparse.Namespace, step: int) -> Step:
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
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--width", type=positive, default=512, help="a multiple of 64 (%(default)s)")
    parser.add_argument("--sequence", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=8)
    parser.add_argument(
        "--shares",
        type=fraction,
        nargs="+",
        default=[1.0, 0.75, 0.5, 0.25, 0.0],
        help="shares of the stages in memory; ratios are relative to the first one",
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the disk tiers (%(default)s)")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.width % 64:
        parser.error(f"--width: expected a multiple of 64, found {args.width}")
    if len(set(args.shares)) < len(args.shares):
        parser.error(f"--shares: expected different shares, found {args.shares}")
    end_on_sigterm()
    args.folder.mkdir(parents=True, exist_ok=True)
    engines: dict[float, Engine] = {}
    failed: list[Row] = []
    with ExitStack() as opened:
        disk = Path(
            opened.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=args.folder))
        )
        for number, share in enumerate(args.shares):
            try:
                engines[share] = opened.enter_context(open_engine(args, share, disk / f"{number}"))
            except HeadwaterError as error:
                print(f"share in memory {share}: {error}", file=sys.stderr, flush=True)
                failed.append({"on_disk": f"share in memory {share}", "failed": error.what})
        found = measure(args, engines)
    base = found.get(args.shares[0], [])
    rows = [*(_row(engines[share], steps, base) for share, steps in found.items()), *failed]
    print_table(rows)
    part = is_part(parser, args, "layers", "width")
    print(save("tiers", rows, part=part))
    return 1 if failed else 0


def measure(args: argparse.Namespace, engines: Mapping[float, Engine]) -> dict[float, list[Step]]:
    """Train with the engines in turn; return the measurements of the counted steps, by share."""
    found: dict[float, list[Step]] = {share: [] for share in engines}
    for step in range(args.rounds + 1):
        for share, engine in engines.items():
            times = step_times(engine, args, step + 1)
            if step:  # the first step fills slabs and allocates memory
                found[share].append(times)
        seconds = ", ".join(f"{steps[-1][0]:.2f} s" for steps in found.values() if steps)
        print(f"round {step}/{args.rounds}  {seconds or 'warm-up'}", flush=True)
    return found


def _row(engine: Engine, steps: Sequence[Step], base: Sequence[Step]) -> Row:
    """Return the row of one engine: medians of its steps, and of the ratios to those of `base`."""
    seconds, cpu_s, times = zip(*steps, strict=True)
    stages = len(engine.plan.trace.stages)
    kinds = ("disk read", "disk write")
    moved = {kind: [each.moved_bytes.get(kind, 0) / MIB for each in times] for kind in kinds}
    busy = [sum(each.busy_s.get(kind, 0.0) for kind in kinds) for each in times]
    return {
        "on_disk": f"{len(engine.plan.on_disk)} of {stages}",
        "step_s": round(statistics.median(seconds), 3),
        "step_ratio": _ratio(steps, base, 0),
        "best_s": round(min(seconds), 3),
        "cpu_s": round(statistics.median(cpu_s), 3),
        "cpu_ratio": _ratio(steps, base, 1),
        "read_MiB": round(statistics.median(moved["disk read"])),
        "written_MiB": round(statistics.median(moved["disk write"])),
        "disk_busy_s": round(statistics.median(busy), 3),
    }


def _ratio(steps: Sequence[Step], base: Sequence[Step], place: Literal[0, 1]) -> float | str:
    """Return the median of the ratios of each round; a dash if the base failed."""
    if not base:
        return "–"
    pairs = zip(steps, base, strict=True)
    return round(statistics.median(step[place] / other[place] for step, other in pairs), 2)


if __name__ == "__main__":
    sys.exit(main())
