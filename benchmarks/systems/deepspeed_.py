"""DeepSpeed ZeRO-3 on its CPU accelerator; needs DeepSpeed.

DeepSpeed clips at 1.0 by default, and a transformers model must be imported before `deepspeed` patches torch.
Without the variables of a launcher DeepSpeed would ask MPI for the rank, and so need mpi4py.

DeepSpeed compiles its operators at the first use. A file named `lock` keeps two processes from compiling the
same operator. If a compiling process is killed, its lock stays, and every later process waits for it forever.
So this benchmark has a separate folder for the operators. A run locks the folder as a whole until the process
ends. All locks of operators that the run finds there are left over, and it removes them.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
from pathlib import Path

from benchmarks.systems.torch_ import build
from benchmarks.workload import Workload, add_workload_arguments, measure, workload_of

OPERATORS = Path.home() / ".cache" / "headwater-benchmarks" / "torch_extensions"
"""Folder of DeepSpeed's compiled operators."""


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


def lock_operators(folder: Path) -> int:
    """Lock the folder of compiled operators for this process, and remove the locks of killed processes.

    Args:
        folder: made if missing.

    Returns:
        The descriptor of the lock, which holds until the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "benchmark.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    for left in folder.rglob("lock"):
        left.unlink()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    return handle


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--nvme", help="folder for the disk tier")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    set_environment()
    lock_operators(OPERATORS)
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
        return float(loss.detach())

    measure(workload, step, parameters=parameters)


if __name__ == "__main__":
    main()
