"""A plan is shown with its stages collapsed, its memories against budgets, and as a picture."""

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
from headwater.plan.command import describe
from headwater.plan.predict import NOMINAL
from headwater.plan.report import draw_plan, group_stages
from headwater.plan.types import Resources


def plan_for(host_memory, **changes):
    arguments = {
        "resources": Resources(host_memory=host_memory, disk=Path("tier"), disk_bytes=GIB),
        "batch_size": 4,
        "precision": Precision("bf16"),
        "optimizer_state_bytes": 8,
        "calibration": NOMINAL,
        "base_bytes": 2 * MIB,
    }
    return make_plan(gpt(layers=12, hidden=256), **(arguments | changes))


@pytest.fixture(scope="module")
def streamed():
    return plan_for(100 * MIB)


def printed(plan, **arguments):
    console = Console(width=140, record=True, file=io.StringIO())
    describe(plan, console=console, **arguments)
    return console.export_text()


def test_equal_stages_are_one_row(streamed):
    groups = group_stages(streamed)
    assert [(group.name, group.count) for group in groups] == [("embedding", 1), ("blocks.0…11", 12)]


def test_what_is_printed(streamed):
    text = printed(streamed)
    for word in ("blocks.0…11", "100 MiB", "disk", "weight store", "step", "overlap", "4 samples"):
        assert word in text


def test_no_step_time_without_a_calibration():
    assert "Predicted step" not in printed(plan_for(GIB, calibration=None))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drawing_is_a_picture(tmp_path, device):
    resources = Resources(device_memory=GIB, host_memory=GIB)
    plan = plan_for(GIB, device=device, resources=resources)
    path = tmp_path / "new" / "plan.png"
    assert str(path) in printed(plan, drawing=path).replace("\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_drawing_without_matplotlib_says_what_to_install(streamed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="headwater\\[plot\\]"):
        draw_plan(streamed, tmp_path / "plan.png")


def test_ranks_and_who_updates_are_shown():
    text = printed(dataclasses.replace(plan_for(GIB), placement=Placement(2, 2)))
    assert "batch: 8 = 2 CSXs × 1 × 4 samples" in text
    assert "masters are updated by ranks 2 to 3, 4.79 M parameters each" in text
