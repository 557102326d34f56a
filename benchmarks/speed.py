"""Tokens per second side by side: `python -m benchmarks.speed --dtype bf16 --rounds 5`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.options import end_on_sigterm
from benchmarks.runner import System, interleave, is_part, report
from benchmarks.workload import add_workload_arguments, workload_of
from headwater.core.arithmetic import Matmul

DEEPSPEED_LIMIT_S = 1200
"""Seconds of a run of DeepSpeed. Its first run compiles C++, which took one to two minutes on two cores."""

PLAIN = System("plain PyTorch", "torch_")

SYSTEMS = [
    PLAIN,
    System("plain PyTorch, allocator tuned", "torch_", ("--tuned",)),
    System("plain PyTorch, Headwater's GPT", "zoo_"),
    System("FSDP2, CPU offload", "torch_", ("--fsdp2",)),
    System("Hugging Face Trainer", "trainer_"),
    System("DeepSpeed ZeRO-3, CPU", "deepspeed_", limit_s=DEEPSPEED_LIMIT_S),
    System("DeepSpeed ZeRO-3, NVMe", "deepspeed_", ("--nvme", "{disk}"), limit_s=DEEPSPEED_LIMIT_S),
    System("Headwater, memory", "headwater_", ("--tier=memory",)),
    System("Headwater, disk", "headwater_", ("--tier=disk", "--disk={disk}", "--gradient_tier=memory")),
]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", help="systems whose name contains one of these, beside plain PyTorch"
    )
    parser.add_argument("--matmul", choices=get_args(Matmul), default="auto", help="setting of Headwater")
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    return parser


def _is_named(system: System, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part.lower() in system.name.lower() for part in parts)


def _with_matmul(system: System, matmul: str) -> System:
    if system.module != "headwater_":
        return system
    return dataclasses.replace(system, options=(*system.options, f"--matmul={matmul}"))


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    systems = [
        _with_matmul(system, args.matmul)
        for system in SYSTEMS
        if system is PLAIN or _is_named(system, args.only)
    ]
    results = interleave(systems, workload_of(args), args.rounds, args.folder)
    part = is_part(parser, args, "only", "matmul")
    return report(f"speed_{args.dtype}", results, PLAIN.name, part=part)


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
