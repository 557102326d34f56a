"""The systems that are compared on a GPU. All of them train the same module on the same tokens."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.shapes import Load
from benchmarks.gpu.streaming_peers import PEERS, check_presence, require
from benchmarks.systems.deepspeed_ import set_environment
from benchmarks.systems.headwater_ import batch_of, traces
from headwater.core.busy import busy_times, fetch_bound
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER
from headwater.core.stage import ParamSpec
from headwater.models.registry import build_model
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.calibrate import calibrate
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.types import Plan, Resources, Tier
from headwater.store.update import Update
from headwater.stream.engine import Engine

Step = Callable[[int], float]
"""A function that runs the step of a number, and returns its loss."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A system that is ready to train.

    Attributes:
        step: runs one step.
        remarks: settings of the system that the row does not name, and what its last step reports.
        predicted: predictions of the plan: seconds of a step, bytes on the device and on the host.
    """

    step: Step
    predicted: dict[str, Any] = dataclasses.field(default_factory=dict)
    remarks: dict[str, Any] = dataclasses.field(default_factory=dict)


def headwater(
    load: Load, stack: ExitStack, tier: Tier | None, disk: Path | None, *, compiled: bool = False
) -> Ready:
    """Return Headwater with its own plan, or with the weights on one tier.

    Args:
        load: the model and its batch.
        stack: closes the engine.
        tier: `memory` or `disk`; the plan chooses if not given.
        disk: folder of the disk tier.
        compiled: compile the blocks, as `compile: true` does in a params file.
    """
    config = load.config()
    model = build_model(config, device="meta").train()
    plan = _plan(load, model, Fixed(tier=tier, compiled=compiled), disk)

    def initial(spec: ParamSpec) -> torch.Tensor:
        return random_weight(spec.name, spec.shape, load.device)

    optimizer = OptimizerSpec("AdamW", {"lr": load.learning_rate})
    engine = stack.enter_context(Engine(model, plan, optimizer, initial=initial, seed=0))

    remarks: dict[str, Any] = {}

    def step(index: int) -> float:
        micro = load.tokens(index).split(plan.micro_batch_size)
        batches = [batch_of(tokens) for tokens in micro]
        begin = time.perf_counter_ns()
        report = engine.train_step(batches, Update(index, {"lr": load.learning_rate}, None))
        end = time.perf_counter_ns()
        thread, bound = RECORDER.lane().thread, fetch_bound(plan.device)
        times = busy_times(RECORDER.events(begin, end), begin, end, thread, bound)
        remarks["last_step"] = dataclasses.asdict(times)
        return report.loss

    return Ready(step, _predicted(plan), remarks)


def _plan(load: Load, model: nn.Module, fixed: Fixed, disk: Path | None) -> Plan:
    precision = Precision("fp32" if load.dtype == "fp32" else "bf16")

    return make_plan(
        PlanRequest(
            traces(model, load.sequence, precision, load.device),
            batch_size=load.batch,
            precision=precision,
            optimizer_state_bytes=8,
            resources=Resources(disk=disk),
            device=load.device,
            calibration=calibrate(load.device, disk) if load.device != "cpu" else None,
            checkpoints=False,
            fixed=fixed,
        )
    )


def _predicted(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    assert prediction is not None, "make_plan predicts"
    return {
        "step_s": prediction.step_s,
        "step_parts": prediction.step_parts,
        "device_bytes": prediction.device_bytes,
        "device_parts": prediction.device_parts,
        "host_bytes": prediction.host_bytes,
        "host_parts": prediction.host_parts,
        "plan": {
            "tier": plan.tier,
            "stages": len(plan.trace.stages),
            "stages_on_device": len(plan.on_device),
            "slabs": plan.slabs,
            "micro_batch": plan.micro_batch_size,
            "activations": sorted({policy.value for policy in plan.activations}),
        },
    }


def plain(load: Load, stack: ExitStack, *, compiled: bool) -> Ready:
    """Return plain PyTorch with everything on the device, by default compiled."""
    model = _filled(load, load.device)
    forward = torch.compile(model) if compiled else model
    return Ready(_stepper(load, forward, model, autocast=load.dtype == "bf16"))


def fsdp2(load: Load, stack: ExitStack) -> Ready:
    """Return FSDP2 on one rank: parameters, gradients and optimizer in host memory, blocks gathered."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, missing in the stubs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = load.device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    model = _filled(load, "cpu")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_one = functools.partial(
        fully_shard,
        mesh=init_device_mesh(load.device, (1,)),
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu),
        mp_policy=mixed if load.dtype == "bf16" else MixedPrecisionPolicy(),
    )
    for block in _blocks(model):
        shard_one(block)
    shard_one(model)
    return Ready(_stepper(load, model, model, autocast=False))


def deepspeed(load: Load, stack: ExitStack) -> Ready:
    """Return DeepSpeed ZeRO-3 on one rank, with parameters and optimizer in page-locked host memory."""
    require("deepspeed")
    if load.device == "cpu":
        set_environment()
    import deepspeed as package

    set_environment()
    place = {"device": "cpu", "pin_memory": load.device == "cuda"}
    settings = {
        "train_micro_batch_size_per_gpu": load.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": load.learning_rate}},
        "bf16": {"enabled": load.dtype != "fp32"},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": place},
        "steps_per_print": 10**9,
    }
    model = _filled(load, "cpu")
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(index: int) -> float:
        loss = engine(_batch(load, index))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return Ready(step)


def streaming_peer(name: str, load: Load, stack: ExitStack) -> Ready:
    """Return a system of `streaming_peers`. Its module is in bf16, even if its masters are in fp32."""
    check_presence(name)
    model = _filled(dataclasses.replace(load, dtype="pure_bf16"), "cpu")
    step, remarks = PEERS[name](load, model)
    return Ready(step, remarks=remarks)


def random_weight(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return the first value of a parameter in host memory: 1 for norms, else normal with deviation 0.02.

    It is drawn on the device, since a CPU would take a minute for 8B parameters.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator(device).manual_seed(sum(name.encode()) + 256 * len(name))
    drawn = torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)
    return drawn.cpu()


def _filled(load: Load, device: str) -> nn.Module:
    """Return the module with the weights that all systems start from."""
    model = build_model(load.config(), device="meta").train()
    if load.dtype == "pure_bf16":
        model = model.to(torch.bfloat16)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(random_weight(name, tuple(param.shape), load.device))
    return model


def _blocks(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(param.numel() for param in blocks.parameters()))


def _batch(load: Load, index: int) -> dict[str, torch.Tensor]:
    return {name: value.to(load.device) for name, value in batch_of(load.tokens(index)).items()}


def _stepper(load: Load, forward: Any, model: nn.Module, *, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=load.learning_rate, fused=True)

    def step(index: int) -> float:
        with torch.autocast(load.device, dtype=torch.bfloat16, enabled=autocast):
            loss = forward(_batch(load, index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


SYSTEMS: dict[str, Callable[[Load, ExitStack, Path | None], Ready]] = {
    "headwater": lambda load, stack, disk: headwater(load, stack, None, disk),
    "headwater_compiled": lambda load, stack, disk: headwater(load, stack, None, disk, compiled=True),
    "headwater_memory": lambda load, stack, disk: headwater(load, stack, "memory", disk),
    "headwater_disk": lambda load, stack, disk: headwater(load, stack, "disk", disk),
    "plain": lambda load, stack, disk: plain(load, stack, compiled=False),
    "plain_compiled": lambda load, stack, disk: plain(load, stack, compiled=True),
    "fsdp2": lambda load, stack, disk: fsdp2(load, stack),
    "deepspeed": lambda load, stack, disk: deepspeed(load, stack),
    "megatrain": lambda load, stack, disk: streaming_peer("megatrain", load, stack),
    "roundpipe": lambda load, stack, disk: streaming_peer("roundpipe", load, stack),
}
"""Makes a system ready, by its name. It gets a stack of things to close, and a folder for a disk tier."""
