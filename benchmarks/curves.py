"""Speed and memory over tokens per step and over model size: `python -m benchmarks.curves --over tokens`.

Writes a PNG with two curves: tokens per second, and peak memory. The table also has the speed relative to
plain PyTorch in the same round. A point that does not fit in memory, or fails otherwise, is left out of its
curve, and its row in the table says why. `--quick` measures fewer and smaller points, in one round: tokens
with a GPT of 30M parameters, and sizes up to 774M with 512 tokens a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.options import end_on_sigterm
from benchmarks.runner import Results, Row, System, interleave, is_part, print_table, save, table
from benchmarks.workload import Dtype, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"

PLAIN = System("plain PyTorch, allocator tuned", "torch_", ("--tuned",))
SYSTEMS = [
    PLAIN,
    System("Headwater, memory", "headwater_", ("--tier=memory",)),
    System("Headwater, disk", "headwater_", ("--tier=disk", "--disk={disk}")),
]

SIZES = {
    10e6: (4, 256, 4, 26000),
    30e6: (6, 384, 6, 50257),
    124e6: (12, 768, 12, 50257),
    354e6: (24, 1024, 16, 50257),
    774e6: (36, 1280, 20, 50257),
    1.3e9: (24, 2048, 16, 50257),
}
"""Layers, width, heads and vocabulary, by the approximate number of parameters."""


class Point(NamedTuple):
    """A point of the curves: its place on the horizontal axis, and what is trained there."""

    place: float
    workload: Workload


QUICK_SIZE = 30e6
"""The model of a quick curve over tokens."""


def token_points(dtype: Dtype, most: float, *, quick: bool = False) -> list[Point]:
    """Return a GPT of 12 blocks of width 768 with 512 to `most` tokens a step; if `quick`, a smaller one."""
    size = QUICK_SIZE if quick else 124e6
    base = Workload(*SIZES[size], dtype=dtype, rotate=1, warmup=1)
    batches = [
        batch
        for batch in ((1, 4, 16, 64) if quick else (1, 2, 4, 8, 16, 32, 64))
        if batch * base.sequence <= most
    ]
    return [
        Point(
            batch * base.sequence,
            dataclasses.replace(base, batch=batch, steps=2 if quick else _num_steps(batch * size)),
        )
        for batch in batches
    ]


def size_points(dtype: Dtype, most: float, *, quick: bool = False) -> list[Point]:
    """Return GPTs of 10M to `most` parameters with 2,048 tokens a step; if `quick`, with 512."""
    batch = 1 if quick else 4
    return [
        Point(
            size,
            Workload(
                *shape,
                batch=batch,
                dtype=dtype,
                # The update of the first step runs in the second one, and touches the optimizer state for the
                # first time.
                warmup=2,
                steps=(1 if size > 500e6 else 2) if quick else _num_steps(batch * size),
            ),
        )
        for size, shape in SIZES.items()
        if size <= most
    ]


def _num_steps(work: float) -> int:
    """Return the number of counted steps: `work` is parameters times sequences."""
    return 5 if work < 1e9 else 3 if work < 4e9 else 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", choices=["tokens", "size"], default="tokens")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--most", type=float, help="largest number of tokens, or of parameters")
    parser.add_argument("--rounds", type=int, help="rounds of all systems (2; 1 if quick)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--folder", type=Path, help="folder of the disk tier")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    points = (
        token_points(args.dtype, args.most or 32768, quick=args.quick)
        if args.over == "tokens"
        else size_points(args.dtype, args.most or (774e6 if args.quick else 1.3e9), quick=args.quick)
    )
    rounds = args.rounds or (1 if args.quick else 2)
    measured: dict[float, Results] = {}
    for point in points:
        print(f"{args.over}: {point.place:.3g}", flush=True)
        measured[point.place] = interleave(SYSTEMS, point.workload, rounds, args.folder)
    name = f"curve_{args.over}_{args.dtype}"
    rows = rows_of(measured)
    print_table(rows)
    part = is_part(parser, args, "quick", "most")
    print(save(name, {place: dataclasses.asdict(results) for place, results in measured.items()}, part=part))
    label = "tokens per step" if args.over == "tokens" else "parameters"
    draw(rows, label, PICTURES / f"{name}.png")
    print(PICTURES / f"{name}.png")
    return 1 if any(results.failures for results in measured.values()) else 0


def rows_of(measured: Mapping[float, Results]) -> list[Row]:
    """Return a row for each place and system."""
    return [
        {"place": place, **row}
        for place, results in measured.items()
        for row in [*table(results.runs, PLAIN.name), *results.failed_rows()]
    ]


def draw(rows: Sequence[Row], label: str, path: Path) -> None:
    """Draw speed and peak memory of every system over `place` as a PNG at `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for system in SYSTEMS:
        own = [row for row in rows if row["system"] == system.name]
        _curve(speed, own, "tokens_per_s", system.name)
        _curve(memory, own, "peak_rss_gib", system.name)
    places = sorted({float(str(row["place"])) for row in rows})
    for axes, title in ((speed, "tokens per second"), (memory, "peak resident memory, GiB")):
        axes.set(xlabel=label, title=title, xscale="log")
        axes.set_xticks(places, [_short(place) for place in places])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    # Speeds of models of different sizes differ by a factor of a hundred.
    speed.set(**({"yscale": "log"} if label == "parameters" else {"ylim": (0, None)}))
    memory.set(ylim=(0, None))
    speed.legend()
    figure.savefig(path, dpi=120)


def _short(number: float) -> str:
    """Return a number as a label: 512, 32k, 10M or 1.3B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1024, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def _curve(axes: Axes, rows: Sequence[Row], column: str, name: str) -> None:
    # A system that failed has no number in this column.
    places = [float(str(row["place"])) for row in rows if isinstance(row.get(column), float | int)]
    values = [float(str(row[column])) for row in rows if isinstance(row.get(column), float | int)]
    axes.plot(places, values, marker="o", label=name)


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
