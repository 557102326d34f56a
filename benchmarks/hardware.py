"""Models that fit a machine, and predicted times of their steps: `python -m benchmarks.hardware`.

The first table has the largest GPT and the largest Llama whose training fits a machine. The other tables are
in `benchmarks.cards`. The planner decides from the sizes of memory and disk, and a dry run of each model, as
it does for a run. In the first table a step has 16 sequences of 2,048 tokens, one at a time, in bf16, with
AdamW.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.cards import one_step_on_h200, small_cards
from benchmarks.runner import Row, print_table, save
from headwater.config import load_params, shipped_params
from headwater.core.precision import Precision
from headwater.core.units import GIB
from headwater.optim import OptimizerSpec
from headwater.plan.options import Fixed, PlanRequest, optimizer_state_bytes
from headwater.plan.search import LimitedRequest, best_plan
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Budgets, Plan, Resources
from headwater.trainer.zoo_job import zoo_trainable

SEQUENCE_LENGTH = 2048
BATCH_SIZE = 16
USABLE = 0.9
"""Share of memory and disk that a plan may use, as in a run without limits."""
HOST_BASE = {"cpu": int(0.7 * GIB), "cuda": 3 * GIB}
"""Host memory of the interpreter and its libraries; with CUDA also of its context."""
SHAPES = {
    "GPT": (
        "cerebras_gpt_111m", "cerebras_gpt_256m", "cerebras_gpt_590m", "cerebras_gpt_1p3b",
        "cerebras_gpt_2p7b", "cerebras_gpt_6p7b", "cerebras_gpt_13b", "175b",
    ),
    "Llama": (
        "llama3p2_1b", "llama3p2_3b", "llama2_7b", "llama2_13b", "llama1_33b", "llama2_70b", "llama3p1_405b",
    ),
}  # fmt: skip
"""Params files of the package, in the order of their sizes."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine; sizes in GiB.

    Attributes:
        name: a row of the table.
        host: host memory.
        device: memory of its GPU; 0 without a GPU.
        disk: free space of its disk; 0 to use no disk.
    """

    name: str
    host: int
    device: int = 0
    disk: int = 0

    @property
    def kind(self) -> str:
        """The device that computes."""
        return "cuda" if self.device else "cpu"

    def request(self, trace: Trace) -> LimitedRequest:
        """Return the request to plan a step of a model on this machine."""
        sizes = (self.device or 1 << 20, self.host, self.disk)
        asked = PlanRequest(
            trace_for=lambda size: trace,
            batch_size=BATCH_SIZE,
            precision=Precision("bf16"),
            optimizer_state_bytes=optimizer_state_bytes(OptimizerSpec("AdamW", {"lr": 1e-4})),
            resources=Resources(disk=Path("disk") if self.disk else None),
            device=self.kind,
            fixed=Fixed(micro_batch_size=1),
            base_bytes=HOST_BASE[self.kind],
        )
        return LimitedRequest(asked, Budgets(*(int(USABLE * size * GIB) for size in sizes)))


MACHINES = [
    Machine("laptop, 8 GiB", 8),
    Machine("the same with a disk of 500 GiB", 8, disk=500),
    Machine("desktop, 32 GiB", 32),
    Machine("the same with a disk of 1,000 GiB", 32, disk=1000),
    Machine("desktop, 64 GiB, GPU of 8 GiB", 64, 8),
    Machine("workstation, 128 GiB, GPU of 24 GiB", 128, 24),
    Machine("the same with a disk of 2,000 GiB", 128, 24, disk=2000),
    Machine("server, 512 GiB, GPU of 80 GiB", 512, 80),
    Machine("server, 2,048 GiB, GPU of 80 GiB", 2048, 80),
    Machine("the same with a disk of 16,000 GiB", 2048, 80, disk=16000),
]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its dry run on each kind of device."""

    name: str
    parameters: int
    traces: dict[str, Trace]


def dry_run(name: str) -> Model:
    """Return a model of the package with the dry run of one sequence."""
    init = load_params(shipped_params()[name]).init
    trainable = zoo_trainable(init, SEQUENCE_LENGTH)
    traces = {
        device: trace_step(
            trainable.model,
            trainable.example(1),
            Precision("bf16"),
            loss_function=trainable.loss,
            device=device,
        )
        for device in ("cpu", "cuda")
    }
    return Model(name, sum(each.numel() for each in trainable.model.parameters()), traces)


def largest(machine: Machine, models: list[Model]) -> tuple[Model, Plan] | None:
    """Return the last model whose training fits the machine, with its plan."""
    for model in reversed(models):
        plan = best_plan(machine.request(model.traces[machine.kind]))
        if plan is not None:
            return model, plan
    return None


def row(machine: Machine, families: dict[str, list[Model]]) -> Row:
    """Return the row of a machine."""
    cells: Row = {"machine": machine.name}
    for family, models in families.items():
        found = largest(machine, models)
        cells[f"largest {family}"] = "–" if found is None else _cell(*found)
    return cells


def _cell(model: Model, plan: Plan) -> str:
    where = "" if plan.tier == "memory" else ", weights on disk"
    return f"{model.parameters / 1e9:.3g} B (`{model.name}`){where}"


def machines() -> list[Row]:
    """Return the table of the largest models for each machine."""
    families = {
        family: [dry_run(f"{family.lower()}/{name}") for name in names] for family, names in SHAPES.items()
    }
    return [row(machine, families) for machine in MACHINES]


TABLES: dict[str, Callable[[], Iterable[Row]]] = {
    "machines": machines,
    "cards": small_cards,
    "h200": one_step_on_h200,
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=sorted(TABLES), action="append", help="make this table alone")
    return parser


def main() -> None:
    """Print the tables and save each of them."""
    for name in make_parser().parse_args().table or TABLES:
        rows = list(TABLES[name]())
        print_table(rows)
        print(save(f"hardware_{name}" if name != "machines" else "hardware", {"rows": rows}))


if __name__ == "__main__":
    main()
