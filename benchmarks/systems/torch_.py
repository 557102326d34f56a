"""A user's loop over transformers' GPT-2: plain PyTorch, FSDP2 with CPU offload, or streamed."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch
from torch import nn

import headwater
from benchmarks.padding import add_padding_argument, text_mask
from benchmarks.workload import (
    MeasuredPlan,
    Step,
    Workload,
    add_workload_arguments,
    described,
    measure,
    workload_of,
)
from headwater.api.registry import streamed_models
from headwater.core.buffers import tune_malloc
from headwater.integrations.attention import use_fast_attention


def build(workload: Workload) -> nn.Module:
    """Return transformers' GPT-2 in the shape of the workload."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=workload.layers,
        n_embd=workload.width,
        n_head=workload.heads,
        n_positions=workload.sequence,
        vocab_size=workload.vocab,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


def stepper(workload: Workload, model: nn.Module, *, autocast: bool, padding: float) -> Step:
    """Return a function that runs a training step with the fused AdamW.

    Args:
        workload: what a step trains on.
        model: the model.
        autocast: compute in bf16 under autocast.
        padding: share of positions that are padding, see `text_mask`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(index: int) -> float:
        tokens = labels = workload.tokens(index)[:, :-1]
        mask = text_mask(len(tokens), tokens.shape[1], padding) if padding else None
        if mask is not None:
            labels = tokens.masked_fill(~mask, -100)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def shard(workload: Workload, model: nn.Module) -> None:
    """Apply FSDP2 on one rank: parameters on the host, blocks gathered one by one."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, missing in the stubs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_one = functools.partial(
        fully_shard,
        mesh=init_device_mesh("cpu", (1,)),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        mp_policy=mixed if workload.dtype == "bf16" else MixedPrecisionPolicy(),
    )
    for block in model.get_submodule("transformer.h").children():
        shard_one(block)
    shard_one(model)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--headwater", action="store_true", help="compile the model for streaming")
    parser.add_argument("--fast_attention", action="store_true", help="attention by Headwater's kernel")
    parser.add_argument("--disk", type=Path, help="folder for the weights of the compiled model")
    add_padding_argument(parser)
    parser.add_argument("--tuned", action="store_true", help="malloc keeps its pages, as in Headwater")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    workload = workload_of(args)
    if args.tuned:
        tune_malloc(keep=True)
    model = build(workload)
    if args.fsdp2:
        shard(workload, model)
    if args.fast_attention:
        use_fast_attention(model)
    if args.headwater:
        on_disk = {"disk": args.disk, "tier": "disk"} if args.disk else {}
        headwater.compile(model, headwater.backend("CSX", **on_disk))
    autocast = workload.dtype == "bf16" and not args.fsdp2
    step = stepper(workload, model, autocast=autocast, padding=args.padding)
    parameters = sum(p.numel() for p in model.parameters())
    measure(workload, step, parameters=parameters, plan=_plan_of_loop if args.headwater else None)


def _plan_of_loop() -> MeasuredPlan:
    """Return the plan of the only streamed model."""
    [model] = streamed_models()
    return described(model.current.present.plan)


if __name__ == "__main__":
    main()
