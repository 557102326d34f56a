"""Host bytes per parameter and small-memory peaks: `python -m benchmarks.memory`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.options import end_on_sigterm, matching
from benchmarks.runner import FailedRunError, Results, Row, System, is_part, print_table, run, save
from benchmarks.workload import Measured, Workload

SMALL = Workload(batch=1, sequence=128, warmup=1, steps=2)
MEDIUM = Workload(layers=24, width=1024, heads=16, batch=1, sequence=128, warmup=1, steps=2)

MEMORY = ("--tier=memory",)
RECOMPUTED_IN_MEMORY = (*MEMORY, "--activations=recompute")
IN_BACKWARD = "--updates=in_backward"
SPILLED = (*MEMORY, "--disk={disk}", "--gradient_tier=disk")
RECOMPUTED = (*SPILLED, "--activations=recompute")

PLAIN = System("plain PyTorch", "torch_")

SYSTEMS = [
    PLAIN,
    System("FSDP2, CPU offload", "torch_", ("--fsdp2",)),
    System("DeepSpeed ZeRO-3, CPU", "deepspeed_"),
    System("Headwater, memory", "headwater_", MEMORY),
    System("Headwater, memory, clipping", "headwater_", (*MEMORY, "--max_norm=1.0")),
    System("Headwater, memory, updates in backward", "headwater_", (*MEMORY, IN_BACKWARD)),
    System("Headwater, memory, recomputed", "headwater_", RECOMPUTED_IN_MEMORY),
    System(
        "Headwater, memory, recomputed, updates in backward",
        "headwater_",
        (*RECOMPUTED_IN_MEMORY, IN_BACKWARD),
    ),
    System("Headwater, memory, gradients on disk", "headwater_", SPILLED),
    System("Headwater, the same, recomputed", "headwater_", RECOMPUTED),
    System("Headwater, the same, recomputed, clipping", "headwater_", (*RECOMPUTED, "--max_norm=1.0")),
    System(
        "Headwater, the same, recomputed, bf16 state", "headwater_", (*RECOMPUTED, "--optimizer_state=bf16")
    ),
    System(
        "Headwater, disk", "headwater_", ("--tier=disk", "--disk={disk}", "--slabs=2", "--gradient_tier=disk")
    ),
]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    parser.add_argument("--only", default="", help="systems whose name contains this")
    return parser


def slope_of(small: Measured, medium: Measured) -> float:
    """Return the bytes of memory for each further parameter, from runs of both sizes."""
    parameters = medium["parameters"] - small["parameters"]
    return (medium["peak_rss_bytes"] - small["peak_rss_bytes"]) / parameters


def row_of(system: str, small: Measured, medium: Measured, plain: float | None) -> Row:
    """Return the row of a system, from its runs of both sizes and the slope of plain PyTorch."""
    slope = slope_of(small, medium)
    return {
        "system": system,
        "host_bytes_per_parameter": round(slope, 1),
        "of_plain": "–" if plain is None else round(slope / plain, 2),
        "peak_gib_124M": round(small["peak_rss_bytes"] / 2**30, 2),
        "peak_gib_354M": round(medium["peak_rss_bytes"] / 2**30, 2),
    }


def measured(system: System, workload: Workload, folder: Path | None) -> Measured:
    """Run a system once, print its peak and return its measurements."""
    result = run(system, workload, folder)
    peak = f"{result['peak_rss_bytes'] / 2**30:5.2f} GiB"
    print(f"{system.name}, {result['parameters'] / 1e6:.0f}M parameters: {peak}", flush=True)
    return result


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    names = matching(parser, "--only", [args.only], [system.name for system in SYSTEMS])
    rows, results, plain = [], Results(), None
    for system in results.present([system for system in SYSTEMS if system.name in names]):
        try:
            small, medium = (measured(system, workload, args.folder) for workload in (SMALL, MEDIUM))
        except FailedRunError as error:
            results.fail(system.name, error)
            continue
        if system is PLAIN:
            plain = slope_of(small, medium)
        rows.append(row_of(system.name, small, medium, plain))
    print_table([*rows, *results.failed_rows()])
    part = is_part(parser, args, "only")
    print(
        save("memory", {"rows": rows, "failures": results.failures, "left_out": results.left_out}, part=part)
    )
    return 1 if results.failures else 0


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
