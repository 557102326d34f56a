"""The report of a plan: equal stages in one row, memory beside its budgets, and a drawing."""

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import gpt

from headwater.core.errors import ConfigError
from headwater.core.placement import Placement
from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.outlook import RunLength
from headwater.plan.predict import NOMINAL
from headwater.plan.report import draw_plan, group_stages, render_plan
from headwater.plan.types import Blocks, Resources


def plan_for(host_memory, **changes):
    arguments = {
        "resources": Resources(host_memory=host_memory, disk=Path("tier"), disk_bytes=GIB),
        "batch_size": 4,
        "precision": Precision("bf16"),
        "optimizer_state_bytes": 8,
        "calibration": NOMINAL,
        "base_bytes": 2 * MIB,
    }
    return make_plan(PlanRequest(gpt(layers=12, hidden=256), **(arguments | changes)))


@pytest.fixture(scope="module")
def streamed():
    return plan_for(120 * MIB, fixed=Fixed(tier="disk"))


def printed(plan, **arguments):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render_plan(plan, **arguments))
    return console.export_text()


def test_a_plan_with_stages_in_memory_and_on_disk_tells_and_draws_both(tmp_path):
    plan = plan_for(100 * MIB)
    assert f"{len(plan.in_memory)} of 13 stages in memory, the others on disk" in printed(plan)
    draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_plan_with_bf16_state_counts_its_bytes_and_says_that_it_is_not_exact():
    exact, bf16 = (
        plan_for(GIB, fixed=Fixed("memory", optimizer_state=state), optimizer_state_bytes=size)
        for state, size in (("exact", 8), ("bf16", 4))
    )
    numel = sum(stage.numel for stage in exact.trace.stages)
    stored = [plan.prediction.host_parts["weight store"] / numel for plan in (exact, bf16)]
    assert stored == [pytest.approx(12, rel=0.01), pytest.approx(8, rel=0.01)]
    assert "optimizer state: bf16, rounded stochastically; the run is not exact" in printed(bf16)
    assert "not exact" not in printed(exact)


def test_equal_stages_are_one_row(streamed):
    groups = group_stages(streamed)
    assert [(group.name, group.count) for group in groups] == [("embedding", 1), ("blocks.0…11", 12)]


def test_the_printed_plan_shows_its_decisions(streamed):
    text = printed(streamed)
    for word in ("blocks.0…11", "120 MiB", "disk", "weight store", "step", "overlap", "4 samples"):
        assert word in text


@pytest.mark.parametrize(
    ("kernels", "sentence"),
    [
        ("exact", ""),
        ("converted", "products in bf16: by fp32 kernels (`matmul: exact` turns them off)"),
        ("fast", "products: by kernels that may round differently (`matmul: exact` turns them off)"),
    ],
)
def test_the_report_names_other_kernels_than_torchs_and_where_they_are_used(streamed, kernels, sentence):
    plan = dataclasses.replace(streamed, kernels=kernels)
    assert sentence in printed(plan) and bool(sentence) == ("`matmul: exact`" in printed(plan))
    compiled = printed(dataclasses.replace(plan, blocks=Blocks(True)))
    assert ("outside of compiled blocks: by" in compiled) == bool(sentence)


def test_times_have_units_and_the_overlap_is_explained(streamed):
    slow = dataclasses.replace(
        streamed.prediction, step_s=9.9e4, step_parts={"compute": 1e5, "overlap": -1e3}
    )
    text = printed(dataclasses.replace(streamed, prediction=slow))
    for words in ("1.16 days", "-16.7 min", "subtracted", "1.15 days", "wire: bytes of one stage's weights"):
        assert words in text
    assert "e+0" not in text


def test_the_report_has_the_rate_and_the_end_of_the_run(streamed):
    plan = dataclasses.replace(streamed, prediction=dataclasses.replace(streamed.prediction, step_s=2.0))
    assert "2 samples/s; 30 steps take 1.00 min" in printed(plan, run=RunLength(steps=30))
    assert "1.02 k tokens/s" in printed(plan, run=RunLength(512))
    assert "warning" not in printed(plan, run=RunLength(512, steps=1000))


def test_a_run_of_months_gets_a_warning(streamed):
    plan = dataclasses.replace(streamed, prediction=dataclasses.replace(streamed.prediction, step_s=3600.0))
    assert "warning: at this rate the run takes 41.7 days" in printed(plan, run=RunLength(steps=1000))


def test_names_of_stages_are_not_wrapped(streamed):
    stages = tuple(
        dataclasses.replace(
            stage, name="position_embeddings_of_all_kinds" if stage.index == 0 else stage.name
        )
        for stage in streamed.trace.stages
    )
    plan = dataclasses.replace(streamed, trace=dataclasses.replace(streamed.trace, stages=stages))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    assert "position_embeddings_of_all_kinds" in console.export_text()


def test_one_slab_is_written_in_the_singular(streamed):
    assert " 1 slabs" not in printed(streamed)


def test_the_report_has_no_step_time_without_a_calibration():
    assert "Predicted step" not in printed(plan_for(GIB, calibration=None))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_drawing_is_a_png_file(tmp_path, device):
    resources = Resources(device_memory=GIB, host_memory=GIB)
    plan = plan_for(GIB, device=device, resources=resources)
    path = tmp_path / "new" / "plan.png"
    draw_plan(plan, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_drawing_without_matplotlib_names_the_package_to_install(streamed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="headwater\\[plot\\]"):
        draw_plan(streamed, tmp_path / "plan.png")


def test_the_report_names_the_ranks_that_update():
    text = printed(dataclasses.replace(plan_for(GIB), placement=Placement(2, 2)))
    assert "batch: 8 = 2 CSXs × 1 × 4 samples" in text
    assert "masters are updated by ranks 2 to 3, 4.79 M parameters each" in text
