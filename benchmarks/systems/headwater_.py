"""Headwater, through the planner and the engine."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import get_args

import torch

from benchmarks.workload import Step, Workload, add_workload_arguments, described, measure, workload_of
from headwater.config.models.decoder import DecoderConfig
from headwater.core.arithmetic import Matmul
from headwater.core.kernels import choose_kernels
from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec
from headwater.core.tensor_memory import tune_allocator
from headwater.core.units import parse_bytes
from headwater.models.registry import build_model, init_parameter
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.calibrate import calibrate
from headwater.plan.options import Fixed, PlanRequest, TraceFor
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Plan, Resources
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions


def config_of(workload: Workload) -> DecoderConfig:
    """Return the model section of a params file for this workload."""
    return DecoderConfig(
        hidden_size=workload.width,
        num_hidden_layers=workload.layers,
        num_heads=workload.heads,
        vocab_size=workload.vocab,
        max_position_embeddings=workload.sequence,
        filter_size=4 * workload.width,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        embedding_dropout_rate=0.0,
    )


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the batch of the model, from [batch, sequence + 1] token ids."""
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "attention_mask": torch.ones_like(tokens[:, 1:]),
    }


def traces(model: torch.nn.Module, sequence: int, precision: Precision, device: str = "cpu") -> TraceFor:
    """Return a function that traces a step of a micro-batch size on a device, for a model of token ids."""

    @functools.cache
    def trace_for(size: int) -> Trace:
        tokens = torch.zeros(size, sequence + 1, dtype=torch.long)
        return trace_step(model, batch_of(tokens), precision, device=device)

    return trace_for


def plan_of(args: argparse.Namespace, workload: Workload, model: torch.nn.Module) -> Plan:
    """Return the plan for the budgets in the options."""
    precision = Precision(workload.dtype)
    disk = Path(args.disk) if args.disk else None
    kernels = choose_kernels(args.matmul, precision, "cpu", own_loop=False)
    return make_plan(
        PlanRequest(
            traces(model, workload.sequence, precision),
            batch_size=workload.batch,
            precision=precision,
            optimizer_state_bytes=4 if args.optimizer_state == "bf16" else 8,
            resources=Resources(host_memory=parse_bytes(args.memory) if args.memory else None, disk=disk),
            calibration=calibrate("cpu", disk, kernels=kernels),
            kernels=kernels,
            checkpoints=False,
            fixed=Fixed(
                tier=args.tier,
                num_slabs=args.slabs,
                activations=Activations(args.activations) if args.activations else None,
                micro_batch_size=args.micro_batch,
                gradient_tier=args.gradient_tier,
                optimizer_state=args.optimizer_state,
                updates=args.updates,
            ),
        )
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--tier", choices=["memory", "disk"])
    parser.add_argument("--disk")
    parser.add_argument("--memory")
    parser.add_argument("--slabs", type=int)
    parser.add_argument("--activations", choices=["keep", "selective", "recompute", "offload"])
    parser.add_argument("--gradient_tier", choices=["memory", "disk"])
    parser.add_argument("--optimizer_state", choices=["exact", "bf16"], default="exact")
    parser.add_argument("--updates", choices=["on_fetch", "in_backward"], default="on_fetch")
    parser.add_argument("--micro_batch", type=int)
    parser.add_argument("--max_norm", type=float)
    parser.add_argument("--matmul", choices=get_args(Matmul), default="auto")
    parser.add_argument("--verify_disk", action="store_true")
    parser.add_argument("--allocator", choices=["tuned", "system"], default="tuned")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    workload = workload_of(args)
    config = config_of(workload)
    model = build_model(config, device="meta").train()
    plan = plan_of(args, workload, model)
    if args.allocator == "tuned":
        tune_allocator(keep=plan.memory_is_ample)

    def initial(spec: ParamSpec) -> torch.Tensor:
        return init_parameter(spec.name, spec.shape, config, seed=0)

    optimizer = OptimizerSpec("AdamW", {"lr": 3e-4})
    options = EngineOptions(verify_disk=args.verify_disk)
    with Engine(model, plan, optimizer, initial=initial, options=options) as engine:
        step = _stepper(engine, plan, workload, args.max_norm)
        parameters = sum(stage.numel for stage in plan.trace.stages)
        measure(workload, step, parameters=parameters, plan=lambda: described(plan))


def _stepper(engine: Engine, plan: Plan, workload: Workload, max_norm: float | None) -> Step:
    def step(index: int) -> float:
        micro = workload.tokens(index).split(plan.micro_batch_size)
        report = engine.train_step(
            [batch_of(tokens) for tokens in micro], Update(index, {"lr": 3e-4}, max_norm)
        )
        return report.loss

    return step


if __name__ == "__main__":
    main()
