"""The results of `validate_only` and `compile_only`, and their texts for a console."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType

from headwater.core.units import counted, format_bytes, format_count
from headwater.optim.spec import OptimizerSpec
from headwater.plan.capture.findings import names_text
from headwater.plan.capture.graph import Captured
from headwater.plan.capture.record import StepRecord
from headwater.plan.capture.report import report_stages, stage_table
from headwater.plan.report import render_plan
from headwater.plan.types import Plan


@dataclasses.dataclass(frozen=True)
class ValidateReport:
    """The result of a successful check of a model with a loss, an optimizer and a batch.

    Attributes:
        record: the training step on fake tensors.
        optimizer: the optimizer, if one was given.
        state_bytes: bytes of optimizer state in the weight store.
    """

    record: StepRecord
    optimizer: OptimizerSpec | None
    state_bytes: int

    def render(self) -> RenderableType:
        """Return the results as text for a console."""
        return Group(*self._lines())

    def _lines(self) -> Iterator[str]:
        record = self.record
        yield "valid: model, loss and batch fit together"
        yield f"batch: {', '.join(record.batch)}"
        stages = record.trace.stages
        count = format_count(sum(stage.numel for stage in stages))
        trained = format_count(sum(stage.trainable_numel for stage in stages))
        yield f"parameters: {count} in {counted(len(stages), 'stage', 'stages')}, {trained} trained"
        if record.unused:
            yield f"without a gradient: {names_text(record.unused)}"
        if self.optimizer is not None:
            yield f"optimizer: {self.optimizer.name} keeps {format_bytes(self.state_bytes)} of state"
        for warning in record.warnings:
            yield f"warning: {warning}"


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The result of `compile_only`.

    Attributes:
        record: the training step on fake tensors.
        captured: the graphs, and the operators that cannot be part of a graph.
        plan: the plan, or `None` if no plan fits.
        refusal: the reason why no plan fits, or `None`.
        mlir: a line that says if MLIR was written.
        files: the paths of the written files.
        compile_dir: the folder of these files.
    """

    record: StepRecord
    captured: Captured
    plan: Plan | None
    refusal: str | None
    mlir: str
    files: tuple[Path, ...]
    compile_dir: Path

    def render(self) -> RenderableType:
        """Return plan, stages and findings as text for a console."""
        reports = report_stages(self.record, self.captured)
        parts: list[RenderableType] = [
            f"no plan: {self.refusal}" if self.plan is None else render_plan(self.plan),
            "",
            stage_table(reports, self.record.trace.micro_batch_size),
            "",
            *(str(finding) for finding in self.captured.findings),
            self.mlir,
            f"written in {self.compile_dir}",
        ]
        return Group(*parts)
