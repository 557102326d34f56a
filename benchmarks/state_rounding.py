"""Loss with optimizer state in fp32 and in bf16: `python -m benchmarks.state_rounding --text FILE.txt.gz`.

A small GPT is trained on the characters of a text, with the same batches and the same initial weights: with
exact state, with `optimizer_state: bf16` (rounded stochastically), and with state that is rounded to nearest.
The mean of Adam's second moment shows whether it still shrinks.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.runner import Row, is_part, print_table, save
from benchmarks.systems.headwater_ import batch_of, config_of
from benchmarks.workload import Workload
from headwater.core.precision import Precision
from headwater.core.stage import OptimizerState
from headwater.models.registry import build_model, init_parameter
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest, optimizer_state_bytes
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.store.update import Update
from headwater.stream.engine import Engine

SHAPE = Workload(layers=3, width=128, heads=4, vocab=256, sequence=128, batch=8)
ADAMW = OptimizerSpec("AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01})
LAST = 50
"""Steps at the end whose mean loss is reported."""


def to_nearest(values: torch.Tensor, out: torch.Tensor, *, stream: str, start: int = 0) -> None:
    """Round to nearest, as torch does; replaces `round_stochastically`."""
    out.copy_(values)


@contextmanager
def rounding(nearest: bool) -> Iterator[None]:
    """Within the context, stores round optimizer state to nearest if `nearest`."""
    if nearest:
        round_so = mock.patch("headwater.store.torch_pieces.round_stochastically", to_nearest)
        # The native kernel rounds by itself.
        with round_so, mock.patch("headwater.store.updater.checked_adam", lambda: None):
            yield
    else:
        yield


def train(text: torch.Tensor, stored: OptimizerState, steps: int, seed: int) -> tuple[list[float], float]:
    """Train, and return the loss of each step and the mean of the second moments at the end."""
    config, precision = config_of(SHAPE), Precision("bf16")
    model = build_model(config, device="meta").train()
    trace = trace_step(
        model, batch_of(torch.zeros(SHAPE.batch, SHAPE.sequence + 1, dtype=torch.long)), precision
    )
    plan = make_plan(
        PlanRequest(
            lambda size: trace,
            batch_size=SHAPE.batch,
            precision=precision,
            optimizer_state_bytes=optimizer_state_bytes(ADAMW, stored=stored),
            resources=Resources(),
            fixed=Fixed(tier="memory", micro_batch_size=SHAPE.batch, optimizer_state=stored),
        )
    )
    batches = torch.Generator().manual_seed(seed)
    losses = []
    with Engine(
        model, plan, ADAMW, initial=lambda spec: init_parameter(spec.name, spec.shape, config, seed=seed)
    ) as engine:
        for step in range(1, steps + 1):
            places = torch.randint(len(text) - SHAPE.sequence - 1, (SHAPE.batch,), generator=batches)
            tokens = torch.stack([text[place : place + SHAPE.sequence + 1] for place in places])
            losses.append(engine.train_step([batch_of(tokens)], Update(step, {})).loss)
        keys = [key for key, _ in engine.parameters()]
        moments = [engine.store.parameters.read_param(key, "exp_avg_sq") for key in keys]
    return losses, float(torch.cat([moment.flatten() for moment in moments]).double().mean())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a text, compressed by gzip")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    text = torch.frombuffer(bytearray(gzip.decompress(args.text.read_bytes())), dtype=torch.uint8).long()
    rows: list[Row] = []
    for seed in range(args.seeds):
        kinds: list[tuple[str, OptimizerState, bool]] = [
            ("exact", "exact", False),
            ("bf16, stochastic", "bf16", False),
            ("bf16, to nearest", "bf16", True),
        ]
        for name, stored, nearest in kinds:
            with rounding(nearest):
                losses, moment = train(text, stored, args.steps, seed)
            rows.append({
                "state": name,
                "seed": seed,
                "loss_at_100": round(sum(losses[75:125]) / 50, 4),
                "loss_at_end": round(sum(losses[-LAST:]) / LAST, 4),
                "mean_second_moment": f"{moment:.3e}",
            })  # fmt: skip
            print_table(rows[-1:])
    print_table(rows)
    part = is_part(parser, args, "steps", "seeds")
    print(save("state_rounding", {"rows": rows}, part=part))


if __name__ == "__main__":
    main()
