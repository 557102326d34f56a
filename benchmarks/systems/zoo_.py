"""The GPT that Headwater streams, in plain PyTorch: the same modules, initial weights and batches.

In fp32 its losses have the bits of the streamed runs. The loop is that of plain PyTorch: the whole model in
memory, the fused AdamW and, in bf16, autocast. The allocator is tuned.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.systems.headwater_ import batch_of, config_of
from benchmarks.workload import add_workload_arguments, measure, workload_of
from headwater.core.buffers import tune_malloc
from headwater.models.registry import build_model, init_parameter


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    return parser


def main() -> None:
    workload = workload_of(make_parser().parse_args())
    tune_malloc(keep=True)
    config = config_of(workload)
    model = build_model(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, config, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(index: int) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=workload.dtype == "bf16"):
            loss: torch.Tensor = model(batch_of(workload.tokens(index)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    measure(workload, step, parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main()
