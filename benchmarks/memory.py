"""Host bytes per parameter and small-memory peaks: `python -m benchmarks.memory`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.runner import System, print_table, run, save
from benchmarks.workload import Workload

SMALL = Workload(batch=1, sequence=128, warmup=1, steps=2)
MEDIUM = Workload(layers=24, width=1024, heads=16, batch=1, sequence=128, warmup=1, steps=2)

SYSTEMS = [
    System("plain PyTorch", "torch_"),
    System("FSDP2, CPU offload", "torch_", ("--fsdp2",)),
    System("DeepSpeed ZeRO-3, CPU", "deepspeed_"),
    System("Headwater, memory", "headwater_", ("--tier=memory",)),
    System("Headwater, memory, split masters", "headwater_", ("--tier=memory", "--masters=split")),
    System(
        "Headwater, memory, split masters, clipping",
        "headwater_",
        ("--tier=memory", "--masters=split", "--max_norm=1.0"),
    ),
    System(
        "Headwater, disk", "headwater_", ("--tier=disk", "--disk={disk}", "--slabs=2", "--gradient_tier=disk")
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    args = parser.parse_args()
    rows = []
    for system in [system for system in SYSTEMS if system.available]:
        small, medium = (run(system, workload, args.folder) for workload in (SMALL, MEDIUM))
        slope = (medium["peak_rss_bytes"] - small["peak_rss_bytes"]) / (
            medium["parameters"] - small["parameters"]
        )
        rows.append(
            {
                "system": system.name,
                "host_bytes_per_parameter": round(slope, 1),
                "peak_gib_124M": round(small["peak_rss_bytes"] / 2**30, 2),
                "peak_gib_354M": round(medium["peak_rss_bytes"] / 2**30, 2),
            }
        )
        print_table(rows[-1:])
    print_table(rows)
    print(save("memory", rows))


if __name__ == "__main__":
    main()
