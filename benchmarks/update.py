"""Time of weight updates: `python -m benchmarks.update`.

AdamW updates a stage in memory, by the native kernel and by torch's optimizer in turn, so that the machine is
as busy for both. Times are the least of several updates, per parameter: CPU time of all threads, and wall
time. The rates are the bytes that one pass has to read and write, divided by the wall time.

With `--gpt` whole steps of a small GPT are measured too.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from unittest import mock

import torch

from benchmarks.compiled_blocks import config_of, plan_of
from benchmarks.runner import Row, is_part, print_table, save
from benchmarks.systems.headwater_ import batch_of
from headwater.core.stage import ParamSpec, StageSpec
from headwater.models.registry import build_model, init_parameter
from headwater.optim.spec import OptimizerSpec
from headwater.store import updater
from headwater.store.layout import Scalars
from headwater.store.memory import MemoryTier
from headwater.store.native_adam import AdamKernel
from headwater.store.native_check import checked_adam
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.update import Part, Pending, Progress, Update
from headwater.store.updater import Updater
from headwater.stream.engine import Engine

ADAMW = OptimizerSpec("AdamW", {"lr": 1e-3, "weight_decay": 0.1})
KERNELS: Mapping[str, Callable[[], AdamKernel | None]] = {"torch": lambda: None, "native": checked_adam}
PARAMS_IN_TENSOR = 7_750_000

_CASES = {
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "bf16, state in bf16": (torch.bfloat16, True),
}


class Stage:
    """A stage in memory with gradients in its wire dtype, which both kernels update."""

    def __init__(self, wire: torch.dtype, bf16_state: bool, num_params: int) -> None:
        rule = UpdateRule(ADAMW)
        count = max(1, num_params // PARAMS_IN_TENSOR)
        shape = (num_params // count,)
        params = tuple(
            ParamSpec(f"p{i}", shape, torch.float32, wire, bf16_state=bf16_state) for i in range(count)
        )
        self._layout = stage_layout(StageSpec(0, "stage", params), rule)
        self._tier = MemoryTier([self._layout])
        self._image = self._tier.resident_wire(0)
        self._gradients = [torch.randn(param.shape).to(wire) for param in params]
        self._scalars: list[Scalars | None] = [None] * count
        self._updaters = {name: Updater(rule, kernel) for name, kernel in KERNELS.items()}
        self._pieces = [piece for group in self._layout.groups for piece in group.pieces]
        self.numel = self._layout.stage.numel
        for view in self._layout.stage.views(self._image):
            view.normal_()

    @property
    def moved_bytes(self) -> int:
        """Bytes that an update has to read (all) and write (all but the gradient), for each parameter."""
        wire = self._layout.stage.slab_bytes
        fields = [field for piece in self._pieces for field in piece.fields]
        stored = wire + sum(math.prod(field.shape) * field.dtype.itemsize for field in fields)
        # A separate master is read, and its wire value only written.
        unread = wire if any(field.name == "master" for field in fields) else 0
        gradients = sum(gradient.nbytes for gradient in self._gradients)
        return round((2 * stored - unread + gradients) / self.numel)

    def update(self, kernel: str) -> tuple[float, float]:
        """Update all parameters, and return the seconds of CPU time and of wall time."""
        part, progress = Part(1, Update(1, {}), torch.tensor(0.5)), Progress.of(self._scalars)
        pending = Pending(1, dict.fromkeys(range(len(self._gradients)), part))
        groups = self._tier.groups(0, self._layout.groups)
        cpu, wall = time.process_time(), time.perf_counter()
        self._updaters[kernel].apply(
            self._layout, self._image, groups, list(self._gradients), self._scalars, pending, progress
        )
        seconds = time.process_time() - cpu, time.perf_counter() - wall
        self._scalars = progress.after
        return seconds


def measure_updates(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way to store masters and state."""
    for name, case in _CASES.items():
        stage = Stage(*case, args.params)
        times = {kernel: [stage.update(kernel)] for kernel in KERNELS}  # the first update is not counted
        for _ in range(args.rounds):
            for kernel, found in times.items():
                found.append(stage.update(kernel))
        row: Row = {"case": name, "bytes": stage.moved_bytes}
        for kernel, found in times.items():
            cpu, wall = (min(each[kind] for each in found[1:]) / stage.numel * 1e9 for kind in (0, 1))
            row[f"{kernel}_cpu_ns"], row[f"{kernel}_wall_ns"] = round(cpu, 2), round(wall, 2)
            row[f"{kernel}_gb_s"] = round(stage.moved_bytes / wall, 1)
        pairs = zip(times["native"][1:], times["torch"][1:], strict=True)
        row["cpu_ratio"] = round(statistics.median(own[0] / its[0] for own, its in pairs), 2)
        yield row


def measure_steps(args: argparse.Namespace) -> Row:
    """Train two engines with the same GPT in turn, and return the medians of the CPU times of their steps."""
    config = config_of("gpt", args)
    generator = torch.Generator().manual_seed(1)
    shape = (args.tokens // args.sequence, args.sequence + 1)
    batch = batch_of(torch.randint(0, config.vocab_size, shape, generator=generator))

    def initial(spec: ParamSpec) -> torch.Tensor:
        return init_parameter(spec.name, spec.shape, config, seed=0)

    times: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    with ExitStack() as opened:
        engines = {}
        for name, kernel in KERNELS.items():
            model = build_model(config, device="meta").train()
            # An engine's updater takes the function when it is made.
            with mock.patch.object(updater, "checked_adam", kernel):
                plan = plan_of(model, batch, args, compiled=False)
                engine = Engine(model, plan, ADAMW, initial=initial, seed=0)
            engines[name] = opened.enter_context(engine)
        for step in range(args.rounds + 1):
            losses = set()
            for name, engine in engines.items():
                cpu = time.process_time()
                losses.add(engine.train_step([batch], Update(step, {})).loss)
                times[name].append(time.process_time() - cpu)
            assert len(losses) == 1, "both kernels have the same bits"
    row: Row = {"case": f"step of a GPT {args.layers}×768, {args.tokens} tokens, {args.dtype}"}
    row |= {f"{name}_cpu_s": round(statistics.median(found[1:]), 3) for name, found in times.items()}
    pairs = zip(times["native"][1:], times["torch"][1:], strict=True)
    return row | {"cpu_ratio": round(statistics.median(own / its for own, its in pairs), 3)}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=124_000_000)
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kernel that are measured")
    parser.add_argument("--threads", type=int, help="threads of torch; by default one per core")
    parser.add_argument("--gpt", action="store_true", help="measure steps of a small GPT too")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a step")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = []
    for row in measure_updates(args):
        rows.append(row)
        print(row, flush=True)
    if args.gpt:
        rows.append(measure_steps(args))
        print(rows[-1], flush=True)
    print_table(rows)
    part = is_part(parser, args, "params")
    print(
        save(
            "update",
            {"rows": rows, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]},
            part=part,
        )
    )


if __name__ == "__main__":
    main()
