"""The files of a compilation: the plan, the graphs and the operators."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType

from headwater.core.errors import ConfigError
from headwater.core.files import disk_errors
from headwater.plan.capture.graph import Captured
from headwater.plan.capture.record import StepRecord
from headwater.plan.capture.report import (
    as_data,
    graph_text,
    operator_table,
    report_stages,
    stage_table,
)
from headwater.plan.report import render_plan
from headwater.plan.types import Plan

_WIDTH = 120
"""Columns of the text files. The reports must not depend on the terminal of the script."""


def write_compile_dir(folder: Path, record: StepRecord, captured: Captured, plan: Plan | str) -> list[Path]:
    """Write the files of a compilation into `folder`, and remove the graphs of an earlier compilation.

    Args:
        folder: created if it does not exist.
        record: the record of a dry run.
        captured: the graphs of the dry run.
        plan: the plan, or the reason why no plan fits.

    Returns:
        The paths of the written files.

    Raises:
        ConfigError: if a file `operators.json` is there that no compilation has written.
        StoreError: if the files cannot be written.
    """
    # Old graphs are removed first: their names are in `operators.json`, which is replaced below.
    _remove_graphs(folder)
    contents = dict(_contents(record, captured, plan))
    with disk_errors(folder):
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return [folder / name for name in contents]


def _contents(record: StepRecord, captured: Captured, plan: Plan | str) -> Iterator[tuple[str, bytes]]:
    if isinstance(plan, str):
        yield "plan.txt", f"{plan}\n".encode()
        yield "plan.json", _json({"refusal": plan})
    else:
        yield "plan.txt", _printed(render_plan(plan))
        yield "plan.json", _json(dataclasses.asdict(plan))
    yield "operators.txt", _printed(_operators(record, captured))
    yield "operators.json", _json(as_data(record, captured))
    for graph in captured.graphs:
        yield _graph_file(graph.name, ".py"), graph_text(graph, record).encode()
        if graph.serialised is not None:
            yield _graph_file(graph.name, ".pt2"), graph.serialised
        if graph.mlir is not None:
            yield _graph_file(graph.name, ".mlir"), graph.mlir.encode()


def _graph_file(name: str, suffix: str) -> str:
    return f"graphs/{name.replace('/', '_')}{suffix}"


def _remove_graphs(folder: Path) -> None:
    """Remove the graph files that an earlier compilation has listed, and no other files."""
    listing = folder / "operators.json"
    if not listing.is_file():
        return
    with disk_errors(listing):
        content = listing.read_bytes()
    try:
        names = [str(graph["name"]) for graph in json.loads(content)["graphs"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            "the file was not written by a compilation, so a compilation does not replace it",
            where=str(listing),
            remedy="move it away, or name another compile_dir",
        ) from error
    with disk_errors(folder):
        for name in names:
            for suffix in (".py", ".pt2", ".mlir"):
                (folder / _graph_file(name, suffix)).unlink(missing_ok=True)


def _operators(record: StepRecord, captured: Captured) -> RenderableType:
    reports = report_stages(record, captured)
    parts: list[RenderableType] = [stage_table(reports, record.trace.micro_batch_size)]
    for report in reports:
        parts += ["", operator_table(report)]
    for finding in captured.findings:
        parts += ["", str(finding)]
    return Group(*parts)


def _printed(renderable: RenderableType) -> bytes:
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(renderable, markup=False, highlight=False)
    return capture.get().encode()


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    assert isinstance(value, Path), f"plans hold no {type(value).__name__}"
    return str(value)
