"""Time of a step with compiled blocks: `python -m benchmarks.compiled_blocks`.

One process has two engines with the same model, one with compiled blocks. They train in turn, so that the
machine is as busy for both. The result is the median of the ratios of neighbouring steps, compiled to eager.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.runner import Row, is_part, print_table, save
from benchmarks.systems.headwater_ import batch_of
from headwater.config.models.decoder import DecoderConfig
from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec
from headwater.core.tensor_memory import tune_allocator
from headwater.models.registry import build_model, init_parameter
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.trace import trace_step
from headwater.plan.types import Plan, Resources
from headwater.store.update import Update
from headwater.stream.engine import Engine

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"vocab_size": 50257, "filter_size": 3072},
    "llama": {"name": "llama", "vocab_size": 32000, "filter_size": 2048},
}
_LR = {"lr": 3e-4}


def config_of(family: str, args: argparse.Namespace) -> DecoderConfig:
    """Return the model section of a family with blocks of width 768."""
    return DecoderConfig(
        hidden_size=768,
        num_hidden_layers=args.layers,
        num_heads=12,
        max_position_embeddings=args.sequence,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        embedding_dropout_rate=0.0,
        **FAMILIES[family],
    )


def plan_of(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], args: argparse.Namespace, *, compiled: bool
) -> Plan:
    """Return a plan with weights in memory and a single micro-batch."""
    precision = Precision(args.dtype)
    size = len(batch["input_ids"])
    return make_plan(
        PlanRequest(
            lambda part: trace_step(model, {key: rows[:part] for key, rows in batch.items()}, precision),
            batch_size=size,
            precision=precision,
            optimizer_state_bytes=8,
            resources=Resources(),
            checkpoints=False,
            fixed=Fixed(tier="memory", micro_batch_size=size, compiled=compiled),
        )
    )


def measure(family: str, args: argparse.Namespace) -> Row:
    """Train the models of both engines in turn, and return the medians."""
    config = config_of(family, args)
    generator = torch.Generator().manual_seed(1)
    shape = (args.tokens // args.sequence, args.sequence + 1)
    batch = batch_of(torch.randint(0, config.vocab_size, shape, generator=generator))

    def initial(spec: ParamSpec) -> torch.Tensor:
        return init_parameter(spec.name, spec.shape, config, seed=0)

    def step(engine: Engine, index: int) -> tuple[float, float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = engine.train_step([batch], Update(index, _LR)).loss
        return time.perf_counter() - wall, time.process_time() - cpu, loss

    with ExitStack() as opened:
        engines = []
        for compiled in (False, True):
            model = build_model(config, device="meta").train()
            plan = plan_of(model, batch, args, compiled=compiled)
            tune_allocator(keep=plan.memory_is_ample)
            optimizer = OptimizerSpec("AdamW", _LR)
            engine = Engine(model, plan, optimizer, initial=initial, seed=0)
            engines.append(opened.enter_context(engine))
        first = [step(engine, 0) for engine in engines]
        step_pairs = [[step(engine, index) for engine in engines] for index in range(1, args.steps + 1)]
    ratios = [[compiled[kind] / eager[kind] for eager, compiled in step_pairs] for kind in (0, 1)]
    return {
        "model": f"{family} {args.layers}×768, {args.dtype}",
        "eager_cpu_s": round(statistics.median(eager[1] for eager, _ in step_pairs), 2),
        "compiled_cpu_s": round(statistics.median(compiled[1] for _, compiled in step_pairs), 2),
        "cpu_ratio": round(statistics.median(ratios[1]), 3),
        "cpu_ratios": f"{min(ratios[1]):.3f} to {max(ratios[1]):.3f}",
        "wall_ratio": round(statistics.median(ratios[0]), 3),
        "first_step_s": round(first[1][0] - first[0][0], 1),
        "loss": f"{step_pairs[-1][0][2]:.4f} {step_pairs[-1][1][2]:.4f}",
        "load": round(os.getloadavg()[0], 1),
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=7, help="steps of each engine that are measured")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    rows = []
    for family in args.families:
        rows.append(measure(family, args))
        print(rows[-1], flush=True)
    print_table(rows)
    part = is_part(parser, args, "families", "layers", "sequence", "tokens", "steps")
    print(save("compiled_blocks", {"rows": rows}, part=part))


if __name__ == "__main__":
    main()
