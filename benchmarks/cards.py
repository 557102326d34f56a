"""Predicted steps on GPUs with little memory, and of one 8B step on an H200: tables of `benchmarks.hardware`.

The planner chooses for each card where the stages are. It predicts the step from a dry run and from rates of
data sheets; a step reaches the share of each rate in `SHARES`. None of these cards was measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

from benchmarks.runner import Row
from headwater.config import load_params, shipped_params
from headwater.core.precision import Precision
from headwater.core.units import GIB
from headwater.optim import OptimizerSpec
from headwater.plan.estimate import estimated_traces
from headwater.plan.options import Fixed, PlanRequest, TraceFor, optimizer_state_bytes
from headwater.plan.rates import Calibration
from headwater.plan.search import LimitedRequest, best_plan
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Budgets, Plan, Resources
from headwater.trainer.zoo_job import zoo_trainable

USABLE = 0.9
"""Share of memory and disk that a plan may use, as in a run without limits."""
HOST_BASE = 3 * GIB
"""Host memory of the interpreter, its libraries and the CUDA context."""
BF16 = Precision("bf16")
BYTES_PER_SAVED = 7
"""Bytes that kernels outside of matrix products read and write, for each byte that autograd saves."""
UPDATE_BYTES = 28
"""Bytes of host memory that the update of a parameter reads and writes."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares of the rates of a data sheet that a step is assumed to reach.

    That of attention is FlashAttention-2's on an H100 (Shah et al., arXiv:2407.08608, abstract).
    """

    products: float = 0.55
    attention: float = 0.35
    memory: float = 0.8
    link: float = 0.8
    disk: float = 0.8


SHARES = Shares()


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU with the rates of its data sheet.

    Attributes:
        name: a GPU with these rates.
        memory: GiB.
        tflops: of dense bf16 matrix products with sums in fp32.
        memory_gb_s: GB/s of its memory.
        link_gb_s: GB/s of its PCIe link, in each direction.
    """

    name: str
    memory: int
    tflops: float
    memory_gb_s: float
    link_gb_s: float


@dataclasses.dataclass(frozen=True)
class Host:
    """The machine around a card: GiB of memory, and GB/s of memory and of its disk."""

    memory: int
    memory_gb_s: float = 89.6  # two channels of DDR5-5600
    disk: int = 0
    disk_gb_s: float = 7.0

    def rates(self, card: Card) -> Calibration:
        """Return the rates of a step on this machine with a card."""
        flops, device = SHARES.products * card.tflops * 1e12, SHARES.memory * card.memory_gb_s * 1e9
        attention = SHARES.attention * card.tflops * 1e12
        disk = SHARES.disk * self.disk_gb_s * 1e9 if self.disk else None
        return Calibration(
            fp32_flops_per_s=flops / 2,
            bf16_flops_per_s=flops,
            fp16_flops_per_s=flops,
            fp32_saved_bytes_per_s=device / BYTES_PER_SAVED,
            bf16_saved_bytes_per_s=device / BYTES_PER_SAVED,
            fp16_saved_bytes_per_s=device / BYTES_PER_SAVED,
            memory_bytes_per_s=device,
            adamw_params_per_s=SHARES.memory * self.memory_gb_s * 1e9 / UPDATE_BYTES,
            link_bytes_per_s=SHARES.link * card.link_gb_s * 1e9,
            disk_read_bytes_per_s=disk,
            disk_write_bytes_per_s=disk,
            fp32_attention_flops_per_s=attention / 2,
            bf16_attention_flops_per_s=attention,
            fp16_attention_flops_per_s=attention,
        )


CARDS = (
    Card("GeForce RTX 4090", 24, 165, 1008, 32),
    Card("GeForce RTX 4080", 16, 97, 717, 32),
    Card("GeForce RTX 4060", 8, 30, 272, 16),
    Card("GeForce RTX 3050 6 GB", 6, 13, 168, 16),
)
HOSTS = (Host(32), Host(64), Host(128))
DISK = 2000
"""GiB of free disk for plans that do not fit without one."""
H200, ITS_HOST = Card("H200", 139, 989, 4800, 64), Host(128, memory_gb_s=200)


def _shape(width: int, layers: int, heads: int, groups: int, filters: int) -> dict[str, object]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_heads": heads,
        "filter_size": filters,
        "extra_attention_params": f"{{num_kv_groups: {groups}}}",
        "vocab_size": 152064,
    }


SHAPES = {
    "1.5B": {**_shape(1536, 28, 12, 2, 8960), "share_embedding_weights": "true"},
    "7B": _shape(3584, 28, 28, 4, 18944),
    "14B": _shape(5120, 48, 40, 8, 13824),
    "32B": _shape(5120, 64, 40, 8, 27648),
}
"""Decoders with the shapes of the Qwen2.5 family; keys of the params of a Llama."""
TOKENS, BATCH_SIZE = 2048, 8
ADAPTERS = {"lora_params": "{r: 16, alpha: 32, dropout: 0.0}"}


def dry_runs(overrides: dict[str, object], tokens: int) -> TraceFor:
    """Return the dry runs of a Llama with other values of some keys; sizes above 4 are estimated."""
    file = shipped_params()["llama/llama3p1_8b"]
    init = load_params(file, [f"--trainer.init.model.{key}={value}" for key, value in overrides.items()]).init
    trainable = zoo_trainable(init, tokens)

    @functools.cache
    def trace_for(size: int) -> Trace:
        trace = trace_step(
            trainable.model, trainable.example(size), BF16, loss_function=trainable.loss, device="cuda"
        )
        return _with_bf16_base(trace)

    return estimated_traces(trace_for)


def _with_bf16_base(trace: Trace) -> Trace:
    """Return a dry run whose frozen parameters are stored in bf16 alone."""
    stages = tuple(
        dataclasses.replace(
            stage,
            params=tuple(
                param if param.requires_grad else dataclasses.replace(param, dtype=param.wire_dtype)
                for param in stage.params
            ),
        )
        for stage in trace.stages
    )
    return dataclasses.replace(trace, stages=stages)


def plan_on(card: Card, host: Host, trace_for: TraceFor, *, batch_size: int, fixed: Fixed) -> Plan | None:
    """Return the plan of a step with AdamW on a machine with a card; `None` if none fits."""
    sizes = (card.memory, host.memory, host.disk)
    asked = PlanRequest(
        trace_for,
        batch_size=batch_size,
        precision=BF16,
        optimizer_state_bytes=optimizer_state_bytes(OptimizerSpec("AdamW", {"lr": 1e-4})),
        resources=Resources(disk=Path("disk") if host.disk else None),
        device="cuda",
        calibration=host.rates(card),
        fixed=fixed,
        base_bytes=HOST_BASE,
    )
    return best_plan(LimitedRequest(asked, Budgets(*(int(USABLE * size * GIB) for size in sizes))))


def small_cards() -> Iterable[Row]:
    """Yield the rows of the table: for a model and a host, the step on each card."""
    for name, shape in SHAPES.items():
        for kind, adapters in (("full", {}), ("LoRA", ADAPTERS)):
            trace_for = dry_runs({**shape, **adapters}, TOKENS)
            for host in HOSTS:
                row: Row = {"model": name, "training": kind, "host": f"{host.memory} GiB"}
                yield row | {f"{card.memory} GiB": _cell(card, host, trace_for) for card in CARDS}


def _cell(card: Card, host: Host, trace_for: TraceFor) -> str:
    """Return the predicted seconds of a step, and the numbers of stages in each tier."""
    for each in (host, dataclasses.replace(host, disk=DISK)):
        plan = plan_on(card, each, trace_for, batch_size=BATCH_SIZE, fixed=Fixed())
        if plan is not None and plan.prediction is not None and plan.prediction.step_s is not None:
            counts = [len(stages) for stages in (plan.on_device, plan.in_host_memory, plan.on_disk)]
            return f"{plan.prediction.step_s:.3g} s, {counts[0]}/{counts[1]}/{counts[2]}"
    return "–"


def one_step_on_h200() -> Iterable[Row]:
    """Yield the predicted steps of Llama 3.1 8B with 16,384 tokens, under several plans."""
    trace_for = dry_runs({}, 4096)
    slow_host = dataclasses.replace(ITS_HOST, memory_gb_s=70)
    for name, host, fixed in (
        ("best plan", ITS_HOST, Fixed()),
        ("one micro-batch", ITS_HOST, Fixed(micro_batch_size=4)),
        ("no stage in device memory", ITS_HOST, Fixed(stages_on_device=0)),
        ("best plan, host memory of 70 GB/s", slow_host, Fixed()),
        ("no stage in device memory, host memory of 70 GB/s", slow_host, Fixed(stages_on_device=0)),
        ("updates in backward", ITS_HOST, Fixed(stages_on_device=0, updates="in_backward")),
        (
            "updates in backward, host memory of 70 GB/s",
            slow_host,
            Fixed(stages_on_device=0, updates="in_backward"),
        ),
    ):
        plan = plan_on(H200, host, trace_for, batch_size=4, fixed=fixed)
        found = None if plan is None else plan.prediction
        if plan is None or found is None or found.step_s is None:
            yield {"plan": name, "step_s": None}
            continue
        yield {
            "plan": name,
            "step_s": round(found.step_s, 2),
            "on device": f"{len(plan.on_device)} of {len(plan.trace.stages)}",
            "micro-batch": plan.micro_batch_size,
            "recomputed": sum(policy.is_recomputed for policy in plan.activations),
            "device GiB": round(found.device_bytes / GIB, 1),
            "host GiB": round(found.host_bytes / GIB, 1),
            **{f"{part} s": round(seconds, 2) for part, seconds in found.step_parts.items() if seconds},
        }
