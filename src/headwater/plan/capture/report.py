"""The results of a recorded dry run as text, tables and plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from headwater.core.tables import titled_table
from headwater.core.units import format_bytes, format_count
from headwater.plan.capture.findings import Finding, names_text
from headwater.plan.capture.record import OperatorTotal, StepRecord

if TYPE_CHECKING:
    from headwater.plan.capture.graph import Captured, StageGraph


@dataclasses.dataclass(frozen=True)
class StageReport:
    """Stages that run the same graphs.

    Attributes:
        stages: their names.
        graphs: names of the graphs; empty if a stage has no separate module or cannot be captured.
        parameters: number of their parameters together.
        saved_bytes: bytes that autograd keeps for their backward.
        operators: totals by operator.
    """

    stages: tuple[str, ...]
    graphs: tuple[str, ...]
    parameters: int
    saved_bytes: int
    operators: dict[str, OperatorTotal]

    @property
    def total(self) -> OperatorTotal:
        return sum(self.operators.values(), OperatorTotal())


def report_stages(record: StepRecord, captured: Captured) -> list[StageReport]:
    """Return the stages of a model in order of first appearance, grouped by their graphs."""
    groups: dict[object, tuple[tuple[str, ...], list[int]]] = {}
    for stage in record.trace.stages:
        graphs = tuple(graph.name for graph in captured.graphs if stage.index in graph.stages)
        # A stage without a graph is alone: nothing says that it equals another one.
        groups.setdefault(graphs or stage.index, (graphs, []))[1].append(stage.index)
    return [_stage_report(record, graphs, indices) for graphs, indices in groups.values()]


def _stage_report(record: StepRecord, graphs: tuple[str, ...], indices: Sequence[int]) -> StageReport:
    stages, costs = record.trace.stages, record.trace.costs
    operators: dict[str, OperatorTotal] = {}
    for index in indices:
        for name, total in record.operators[index].items():
            operators[name] = operators.get(name, OperatorTotal()) + total
    return StageReport(
        stages=tuple(stages[index].name for index in indices),
        graphs=graphs,
        parameters=sum(stages[index].numel for index in indices),
        saved_bytes=sum(costs[index].saved_bytes for index in indices),
        operators=operators,
    )


def graph_text(graph: StageGraph, record: StepRecord) -> str:
    """Return a graph as Python, with a comment that names its modules."""
    count = f"{len(graph.modules)} modules: " if len(graph.modules) > 1 else ""
    autocast = f", within autocast to {record.precision.name}" if record.precision.mixed else ""
    size = record.trace.micro_batch_size
    return (
        f"# {graph.kind}: {count}{names_text(graph.modules)}\n"
        f"# The forward of a micro-batch of {size}{autocast}, as a function of weights and inputs.\n\n"
        f"{graph.text.strip()}\n"
    )


def stage_table(reports: Sequence[StageReport], micro_batch_size: int) -> Table:
    """Return a table of parameters, operators, FLOPs and bytes of each kind of stage."""
    title = f"Forward and backward of a micro-batch of {micro_batch_size}"
    table = _table(title, "stages", "×", "params", "ops", "FLOP", "read", "written", "saved")
    for report in reports:
        table.add_row(names_text(report.stages), str(len(report.stages)), *_figures(report))
    every = StageReport(
        stages=(),
        graphs=(),
        parameters=sum(report.parameters for report in reports),
        saved_bytes=sum(report.saved_bytes for report in reports),
        operators={str(i): report.total for i, report in enumerate(reports)},
    )
    table.add_row("all", str(sum(len(report.stages) for report in reports)), *_figures(every), style="bold")
    return table


def _figures(report: StageReport) -> Iterator[str]:
    total = report.total
    yield format_count(report.parameters)
    yield str(total.forward + total.backward)
    yield format_count(total.flops)
    yield from map(format_bytes, (total.read_bytes, total.written_bytes, report.saved_bytes))


def operator_table(report: StageReport) -> Table:
    """Return a table of the operators of one kind of stage, those with most FLOPs and bytes first."""
    title = f"{names_text(report.stages)}: operators"
    table = _table(title, "operator", "forward", "backward", "FLOP", "read", "written")
    for name, total in sorted(report.operators.items(), key=lambda item: _weight(item[1])):
        table.add_row(
            name,
            str(total.forward),
            str(total.backward),
            format_count(total.flops),
            format_bytes(total.read_bytes),
            format_bytes(total.written_bytes),
        )
    return table


def _weight(total: OperatorTotal) -> tuple[int, int]:
    return -total.flops, -total.read_bytes - total.written_bytes


def _table(title: str, *columns: str) -> Table:
    table = titled_table(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return table


def as_data(record: StepRecord, captured: Captured) -> dict[str, Any]:
    """Return everything as data that JSON can hold."""
    return {
        "precision": record.precision.name,
        "micro_batch_size": record.trace.micro_batch_size,
        "batch": list(record.batch),
        "stages": [dataclasses.asdict(report) for report in report_stages(record, captured)],
        "graphs": [
            {"name": graph.name, "kind": graph.kind, "modules": list(graph.modules)}
            for graph in captured.graphs
        ],
        "findings": [_finding_data(finding) for finding in captured.findings],
        "parameters_without_gradient": list(record.unused),
        "warnings": list(record.warnings),
    }


def _finding_data(finding: Finding) -> dict[str, Any]:
    return {
        "operator": finding.operator,
        "problem": finding.problem,
        "captured": finding.captured,
        "modules": list(finding.modules),
        "file": finding.place.file,
        "line": finding.place.line,
    }
