"""DeepSpeed ZeRO-3 on its CPU accelerator; needs DeepSpeed.

DeepSpeed clips at 1.0 by default, and a transformers model must be imported before `deepspeed` patches torch.
Without the variables of a launcher DeepSpeed would ask MPI for the rank, and so need mpi4py.
"""

from __future__ import annotations

import argparse
import os
import socket

from benchmarks.systems.torch_ import build
from benchmarks.workload import Workload, add_workload_arguments, measure, workload_of


def settings(workload: Workload, nvme: str | None) -> dict[str, object]:
    """Return the settings of ZeRO-3 with parameters and optimizer on the host, or on disk."""
    place: dict[str, object] = {"device": "nvme", "nvme_path": nvme} if nvme else {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": workload.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": workload.dtype == "bf16"},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "offload_optimizer": {**place, "pin_memory": False, "buffer_count": 4},
            "offload_param": {**place, "pin_memory": False, "buffer_count": 5, "buffer_size": 50_000_000},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1},
        "steps_per_print": 10**9,
    }


def set_environment() -> None:
    """Set the variables of DeepSpeed on a CPU, and those of a launcher that has started one rank."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--nvme", help="folder for the disk tier")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    set_environment()
    workload = workload_of(args)
    model = build(workload)
    import deepspeed

    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(workload, args.nvme)
    )

    def step(index: int) -> float:
        tokens = workload.tokens(index)[:, :-1]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    measure(workload, step, parameters=parameters)


if __name__ == "__main__":
    main()
