"""Reports of a plan: tables for a terminal, and a picture."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from headwater.core.files import disk_errors
from headwater.core.packages import importing
from headwater.core.stage import StageSpec
from headwater.core.tables import titled_table
from headwater.core.units import counted, format_bytes, format_count
from headwater.plan.belady import replay, slab_capacity, slab_policy, slab_positions
from headwater.plan.outlook import RunLength, outlook, step_table
from headwater.plan.step_trace import StageCost
from headwater.plan.types import Activations, Plan, Resources

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#ffffff", "#d5dde6", "#4878a8", "#d79b3c", "#8f6bb3", "#b3543c", "#6fa06a")
_LEGEND = (
    "×: number of equal stages. wire: bytes of one stage's weights, as they are sent to the device. "
    "saved: bytes of activations that its backward needs."
)
_IN = {"device memory": "in device memory", "memory": "in memory", "disk": "on disk"}
_MOST_NAMES = 24
"""Maximum number of stages with a name in a picture; more would overlap."""
_ABSENT, _READY = 0, 1
_USED = {
    Activations.KEEP: 2,
    Activations.RECOMPUTE: 3,
    Activations.OFFLOAD: 4,
    Activations.RECOMPUTE_FROM_HOST: 5,
    Activations.SELECTIVE: 6,
}
_PART_COLORS = {
    "interpreter": "#c9c9c9",
    "data workers": "#b0b0c0",
    "weight store": "#7fa8c9",
    "masks": "#c4b0a0",
    "masking": "#a89484",
    "staging": "#a9b7a0",
    "snapshot": "#c9b7a0",
    "slabs": "#5f9e94",
    "activations": "#d9a760",
    "gradients": "#b58bb5",
    "allocator": "#e3d9c9",
    "other models": "#d0d0d0",
    "initial weights": "#9fb8c9",
}


@dataclasses.dataclass(frozen=True)
class StageGroup:
    """Consecutive equal stages.

    Attributes:
        name: their names in one text: `blocks.0…11`.
        count: number of stages.
        stage: the first of them.
        cost: cost of one of them.
        policy: what happens to their activations.
    """

    name: str
    count: int
    stage: StageSpec
    cost: StageCost
    policy: Activations


def group_stages(plan: Plan) -> list[StageGroup]:
    """Return the plan's stages in order; consecutive equal stages, or parts of blocks, are one group."""
    stages, costs, policies = plan.trace.stages, plan.trace.costs, plan.activations

    def key(block: tuple[int, ...]) -> object:
        return [(_shape(stages[stage]), costs[stage], policies[stage]) for stage in block]

    groups = []
    for _, equal in groupby(_blocks(plan), key=key):
        # Equal blocks share their rows: there is one row for each part of a block.
        for same in zip(*equal, strict=True):
            first, last = stages[same[0]], stages[same[-1]]
            name = _joined_name(first.name, last.name)
            groups.append(StageGroup(name, len(same), first, costs[same[0]], policies[same[0]]))
    return groups


def _blocks(plan: Plan) -> list[tuple[int, ...]]:
    """Return the stages in order; the stages of a divided block are together in one tuple."""
    members = plan.trace.members
    return [members.get(stage.index, (stage.index,)) for stage in plan.trace.stages if stage.part_of is None]


def _divided(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each kind of divided block."""
    stages = plan.trace.stages
    for count, equal in groupby(_blocks(plan), key=len):
        names = [stages[block[-1]].name for block in equal]
        if count > 1:
            verb = "is" if len(names) == 1 else "are each"
            name = _joined_name(names[0], names[-1])
            yield f"{name} {verb} divided into {count} stages, because no plan fits with larger stages"


def _shape(stage: StageSpec) -> object:
    return [(param.shape, param.wire_dtype, param.requires_grad) for param in stage.params]


def _joined_name(first: str, last: str) -> str:
    """Join `blocks.0` and `blocks.11` to `blocks.0…11`, or to both names if more than one number differs."""
    first = first or "(model)"
    if first == last:
        return first
    pattern = re.escape(first)
    for number in re.finditer(r"\d+", first):
        pattern = re.escape(first[: number.start()]) + r"(\d+)" + re.escape(first[number.end() :])
        match = re.fullmatch(pattern, last)
        if match:
            return f"{first[: number.end()]}…{match[1]}{first[number.end() :]}"
    return f"{first} … {last}"


def render_plan(plan: Plan, run: RunLength | None = None) -> RenderableType:
    """Return the whole plan: stages, decisions, memory against budgets, and the time of step and run."""
    prediction = plan.predicted
    parts: list[RenderableType] = [
        _stage_table(plan),
        _LEGEND,
        "",
        *_decisions(plan),
        "",
        _memory_table(plan),
    ]
    if prediction.step_s is not None:
        parts += ["", step_table(prediction)]
        if run is not None:
            parts += list(outlook(plan, run))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = titled_table(title)
    for index, column in enumerate(columns):
        # A name broken into two lines could not be searched for.
        if index == 0:
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(column, justify="right", overflow="fold")
    return table


def _stage_table(plan: Plan) -> Table:
    title = f"Stages, for a micro-batch of {plan.micro_batch_size}"
    table = _table(title, "stage", "×", "parameters", "wire", "forward FLOP", "saved", "activations")
    for group in group_stages(plan):
        table.add_row(
            group.name,
            str(group.count),
            format_count(group.stage.numel),
            format_bytes(group.stage.slab_bytes),
            format_count(group.cost.forward.flops),
            format_bytes(group.cost.saved_bytes),
            group.policy.value,
        )
    stages, costs = plan.trace.stages, plan.trace.costs
    table.add_row(
        "all",
        str(len(stages)),
        format_count(sum(stage.numel for stage in stages)),
        format_bytes(sum(stage.slab_bytes for stage in stages)),
        format_count(sum(cost.forward.flops for cost in costs)),
        format_bytes(sum(cost.saved_bytes for cost in costs)),
        "",
        style="bold",
    )
    return table


def _decisions(plan: Plan) -> Iterator[str]:
    where, in_place = f"in {_slab_text(plan)}", len(plan.read_in_place)
    if in_place == len(plan.trace.stages):
        where = "read in place"
    elif in_place:
        where += f"; {counted(in_place, 'stage is', 'stages are')} read in place"
    tier = _tiers_text(plan)
    yield from _divided(plan)
    yield f"weights: {plan.precision.name} on {plan.device}, {where}"
    yield from _products_text(plan)
    if plan.uses_attention_kernel:
        yield "attention: by the kernel of this package, in bf16 (`attention: torch` turns it off)"
    if plan.trace.inference:
        yield f"masters: {tier}; nothing is kept for backward"
    else:
        if plan.has_bf16_state:
            yield "optimizer state: bf16, rounded stochastically; the run is not exact"
        left_out = sum(param.numel - param.stored_numel for param in plan.trace.params)
        if left_out:
            yield f"masked weights: {format_count(left_out)} without optimizer state, zero in every step"
        yield f"masters and optimizer state: {tier}; gradients wait for the update: {plan.gradient_tier}"
        if plan.updates == "in_backward":
            yield (
                "updates: during the backward, stage by stage; a step that fails is lost, and the run "
                "continues from its last checkpoint"
            )
        else:
            yield "updates: when a stage is fetched next; a step that fails is undone"
    yield from _blocks_text(plan)
    samples = plan.micro_batch_size * plan.num_micro_batches
    count = plan.placement.num_csx
    ranks = "" if count == 1 else f"{count} CSXs × "
    yield f"batch: {samples * count} = {ranks}{plan.num_micro_batches} × {plan.micro_batch_size} samples"
    owners = plan.placement.owners
    if len(owners) < plan.placement.size:
        share = format_count(sum(stage.numel for stage in plan.trace.stages) // len(owners))
        names = f"rank {owners[0]}" if len(owners) == 1 else f"ranks {owners[0]} to {owners[-1]}"
        yield f"masters are updated by {names}, {share} parameters each; these ranks do not compute"


def _products_text(plan: Plan) -> Iterator[str]:
    """Yield a sentence about the kernels of matrix products, if these are not torch's."""
    # Compiled code on a CPU calls torch's kernels itself.
    where = " outside of compiled blocks" if plan.device == "cpu" and plan.blocks.compiled else ""
    if plan.kernels == "converted":
        yield f"products in {plan.precision.name}{where}: by fp32 kernels (`matmul: exact` turns them off)"
    if plan.kernels == "fast":
        yield f"products{where}: by kernels that may round differently (`matmul: exact` turns them off)"


def _blocks_text(plan: Plan) -> Iterator[str]:
    """Yield a sentence about compiled blocks, if they are compiled or a measurement could decide it."""
    blocks = plan.blocks
    if blocks.compiled or blocks.reason:
        reason = f": {blocks.reason}" if blocks.reason else ""
        yield f"blocks are {'compiled' if blocks.compiled else 'not compiled'}{reason}"


def _tiers_text(plan: Plan) -> str:
    """Return where the stages are stored."""
    kinds = {"device memory": plan.on_device, "memory": plan.in_host_memory, "disk": plan.on_disk}
    used = {name: len(stages) for name, stages in kinds.items() if stages}
    if len(used) == 1:
        return next(iter(used))
    (first, count), *others = used.items()
    text = f"{count} of {len(plan.trace.stages)} stages {_IN[first]}"
    for name, number in others[:-1]:
        text += f", {number} {_IN[name]}"
    return f"{text}, the others {_IN[others[-1][0]]}"


def _slab_text(plan: Plan) -> str:
    in_place = plan.read_in_place
    sizes = [stage.slab_bytes for stage in plan.trace.stages if stage.index not in in_place]
    count = sum(slab_capacity(sizes, plan.slabs).values())
    return f"{counted(count, 'slab', 'slabs')} for {counted(len(sizes), 'stage', 'stages')}"


@dataclasses.dataclass(frozen=True)
class _MemoryRow:
    """One kind of memory of a plan; `limit` is `None` if it has no limit."""

    name: str
    needs: int
    limit: int | None
    parts: dict[str, int]

    @property
    def limit_text(self) -> str:
        return "no limit" if self.limit is None else format_bytes(self.limit)


def _memories(plan: Plan) -> Iterator[_MemoryRow]:
    """Yield a row for each of device memory, host memory and disk that a plan uses."""
    prediction, budget = plan.predicted, plan.budget or Resources()
    rows = (
        _MemoryRow("device", prediction.device_bytes, budget.device_memory, prediction.device_parts),
        _MemoryRow("host", prediction.host_bytes, budget.host_memory, prediction.host_parts),
        _MemoryRow("disk", prediction.disk_bytes, budget.disk_bytes, prediction.disk_parts),
    )
    return (row for row in rows if row.needs)


def _memory_table(plan: Plan) -> Table:
    table = _table("Predicted peak", "memory", "needs", "budget", "used", "made up of")
    table.columns[-1].justify = "left"
    for row in _memories(plan):
        share = f"{row.needs / row.limit:.0%}" if row.limit else ""
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in row.parts.items() if size)
        table.add_row(row.name, format_bytes(row.needs), row.limit_text, share, parts)
    return table


def draw_plan(plan: Plan, path: Path) -> None:
    """Write a PNG to `path`: which stages are in slabs at each use of a step, and the peaks of memory.

    Raises:
        ConfigError: if matplotlib is not installed.
        StoreError: if the file cannot be written.
    """
    with importing("drawing a plan", "plot", otherwise="leave the drawing out"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    schedule, memory = figure.subplots(2, 1, height_ratios=[3, 1])
    _draw_schedule(plan, schedule)
    _draw_memory(plan, memory)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)


def _draw_schedule(plan: Plan, axes: Axes) -> None:
    """Draw each stage during a micro-batch: gray while its weights are ready, colored when they are used."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    sizes, schedule = [stage.slab_bytes for stage in plan.trace.stages], plan.schedule
    in_place = plan.read_in_place
    positions = slab_positions(schedule, in_place)
    cells = [[_READY if stage in in_place else _ABSENT] * len(schedule) for stage in range(len(sizes))]
    # The second round overwrites the first, which began empty.
    for use in replay(slab_policy(schedule, sizes, plan.slabs, in_place), rounds=2):
        begin, end = positions[use.position], [*positions, len(schedule)][use.position + 1]
        for stage in set(range(len(sizes))) - in_place:
            cells[stage][begin:end] = [_READY if stage in use.resident else _ABSENT] * (end - begin)
    for position, stage in enumerate(schedule):
        cells[stage][position] = _USED[plan.activations[stage]]
    axes.imshow(cells, cmap=ListedColormap(_COLORS), vmin=0, vmax=len(_COLORS) - 1, aspect="auto")
    if not plan.trace.inference:
        axes.axvline(len(schedule) / 2 - 0.5, color="black", linewidth=0.8, linestyle=":")
    shown = {_READY, *(_USED[each] for each in plan.activations)}
    meanings = {_READY: "weights ready"} | {
        _USED[each]: f"used; activations: {each.value}" for each in Activations
    }
    patches = [Patch(color=_COLORS[code], label=meanings[code]) for code in sorted(shown)]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    axes.set(title="Weights", xlabel="use: forward, then backward", ylabel="stage")
    if len(sizes) <= _MOST_NAMES:
        axes.set_yticks(range(len(sizes)), [stage.name or "(model)" for stage in plan.trace.stages])


def _draw_memory(plan: Plan, axes: Axes) -> None:
    """Draw one bar for each of device memory, host memory and disk: its contents, relative to its budget."""
    rows = list(_memories(plan))
    for height, row in enumerate(rows):
        left = 0.0
        for part, size in row.parts.items():
            share = size / (row.limit or row.needs)
            axes.barh(height, share, left=left, color=_PART_COLORS[part], edgecolor="white")
            if share > 0.06:
                axes.text(left + share / 2, height, part, ha="center", va="center", fontsize="small")
            left += share
    labels = [f"{row.name}\n{format_bytes(row.needs)} of {row.limit_text}" for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(title="Predicted peak", xlabel="share of the budget", xlim=(0, 1.05))
    axes.invert_yaxis()
