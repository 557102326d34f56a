"""Stages in device memory: their bytes, their time, how many a plan chooses, and refusals."""

import dataclasses
import io
from itertools import pairwise
from pathlib import Path

import pytest
from clusters import SERVERS, WAFERS, point
from rich.console import Console
from synthetic import gpt, gpt_trace
from test_predict import RATES, make, numel, predict

from headwater.api.planner import plan_for_store, with_second_store
from headwater.core.errors import ConfigError, DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import GIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.predict import NOMINAL
from headwater.plan.report import draw_plan, render_plan
from headwater.plan.types import Activations, Resources, StoreShare
from headwater.stream.store_settings import StoreSettings

ARGUMENTS = {
    "batch_size": 4,
    "precision": Precision("bf16"),
    "optimizer_state_bytes": 8,
    "calibration": dataclasses.replace(NOMINAL, link_bytes_per_s=1e9, memory_bytes_per_s=1e12),
    "base_bytes": 0,
}
SHAPE = gpt(layers=24, hidden=1024, tied=False)
NUMEL = numel(SHAPE(4))


def request_for(device_memory=None, host_memory=64 * GIB, *, fixed=None, disk=None, **changes):
    resources = Resources(device_memory, host_memory, disk=disk, disk_bytes=64 * GIB)
    request = PlanRequest(
        SHAPE, resources=resources, device="cuda", fixed=fixed or Fixed(micro_batch_size=4), **ARGUMENTS
    )
    return dataclasses.replace(request, **changes)


def planned(device_memory=None, host_memory=64 * GIB, **changes):
    return make_plan(request_for(device_memory, host_memory, **changes))


@pytest.mark.parametrize("count", [0, 2, 4, 8])
def test_the_link_carries_only_the_stages_outside_device_memory(count):
    trace = gpt_trace(layers=8, tied=False)
    blocks = tuple(range(1, 1 + count))
    plan = make(trace, device="cuda", on_device=blocks)
    moved = numel(trace) - count * trace.stages[1].numel
    link = predict(plan).step_parts["link"]
    assert link == pytest.approx((2 + 2) * moved / RATES.link_bytes_per_s)
    parts = predict(plan).step_parts
    assert parts["update"] == pytest.approx(predict(make(trace)).step_parts["update"] * moved / numel(trace))
    assert ("update on device" in parts) == bool(count)


def test_a_stage_on_the_device_takes_its_bytes_from_host_memory():
    trace = gpt_trace(layers=8, tied=False)
    none, some = (predict(make(trace, device="cuda", on_device=stages)) for stages in ((), (1, 2, 5)))
    moved = 3 * trace.stages[1].numel
    parts = none.host_parts, some.host_parts
    assert parts[0]["weight store"] - parts[1]["weight store"] == 12 * moved
    assert parts[0]["gradients"] - parts[1]["gradients"] == 2 * moved
    assert some.device_parts["weight store"] == 12 * moved
    assert none.device_parts["slabs"] - some.device_parts["slabs"] == 2 * moved
    several = predict(make(trace, device="cuda", on_device=(1, 2, 5), num_micro_batches=2))
    assert several.device_parts["gradients"] >= 4 * moved, "sums are in fp32"


def test_more_device_memory_holds_more_stages_and_never_makes_a_step_slower():
    room = (GIB // 2, GIB, 2 * GIB, 3 * GIB, 5 * GIB, 9 * GIB)
    plans = [planned(each) for each in room]
    assert all(plan.prediction.device_bytes <= each for plan, each in zip(plans, room, strict=True))
    counts = [len(plan.on_device) for plan in plans]
    assert 0 < counts[0] < counts[1] < counts[2]
    seconds = [plan.prediction.step_s for plan in plans]
    # The host updates stages beside the forward, so a smaller number may be a little better.
    assert all(after <= 1.02 * before for before, after in pairwise(seconds))
    assert seconds[-1] < 0.7 * seconds[0]


def test_device_and_host_memory_together_hold_what_neither_can():
    whole = 14 * NUMEL
    with pytest.raises(DoesNotFitError):
        planned(whole * 3 // 4, whole // 2, fixed=Fixed(micro_batch_size=4, stages_on_device=0))
    plan = planned(whole * 3 // 4, whole // 2)
    assert plan.on_device and plan.in_host_memory and not plan.on_disk


def test_three_tiers_in_one_plan(tmp_path):
    plan = planned(3 * GIB, GIB, disk=Path("tier"))
    counts = [len(stages) for stages in (plan.on_device, plan.in_host_memory, plan.on_disk)]
    assert all(counts) and sum(counts) == 26
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    text = console.export_text()
    assert f"{counts[0]} of 26 stages in device memory, {counts[1]} in memory, the others on disk" in text
    assert "update on device" in text
    draw_plan(plan, tmp_path / "plan.png")
    everything = planned(16 * GIB, fixed=Fixed(stages_on_device=26))
    console.print(render_plan(everything))
    assert "masters and optimizer state: device memory" in console.export_text()
    draw_plan(everything, tmp_path / "plan.png")


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (3, 3), (99, 26)])
def test_a_fixed_number_of_stages_is_on_the_device(asked, found):
    assert len(planned(16 * GIB, fixed=Fixed(stages_on_device=asked)).on_device) == found


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_fixed_tier_has_no_stage_on_the_device_unless_that_is_asked_for(tier):
    fixed = Fixed(tier=tier, micro_batch_size=4)
    assert not planned(16 * GIB, disk=Path("tier"), fixed=fixed).on_device
    with_some = planned(16 * GIB, disk=Path("tier"), fixed=dataclasses.replace(fixed, stages_on_device=5))
    assert len(with_some.on_device) == 5
    assert bool(with_some.on_disk) == (tier == "disk")


def test_a_tier_larger_than_the_device_is_refused_with_the_nearest_number_that_fits():
    fixed = Fixed(stages_on_device=20, micro_batch_size=4)
    with pytest.raises(DoesNotFitError, match=r"stages_on_device \d+") as refused:
        planned(GIB, fixed=fixed)
    words = refused.value.remedy.split()
    nearest = int(words[words.index("stages_on_device") + 1].rstrip(","))
    assert 0 < nearest < 20
    assert len(planned(GIB, fixed=dataclasses.replace(fixed, stages_on_device=nearest)).on_device) == nearest
    with pytest.raises(DoesNotFitError):
        planned(GIB, fixed=dataclasses.replace(fixed, stages_on_device=nearest + 1))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"device": "cpu"}, "the CPU computes"),
        ({"ranks": 2, "share": StoreShare(sums_stay=True)}, "there are several hosts"),
        ({"ranks": 3, "share": StoreShare(store_ranks=1)}, "there are store ranks"),
        ({"ranks": 2, "device_tier": False}, "several ranks run your own loop"),
    ],
)
def test_a_device_tier_needs_the_ranks_of_one_host_on_gpus(changes, found):
    with pytest.raises(ConfigError, match=found):
        planned(GIB, fixed=Fixed(stages_on_device=2), **changes)
    assert not planned(GIB, **changes).on_device


def test_each_of_several_ranks_has_the_stages_and_the_sums_of_their_gradients_arrive():
    fixed = Fixed(stages_on_device=5, micro_batch_size=4, num_slabs=4, activations=Activations.KEEP)
    one, two = (planned(64 * GIB, fixed=fixed, ranks=ranks) for ranks in (1, 2))
    assert one.on_device == two.on_device
    block = max(one.trace.stages[stage].numel for stage in one.on_device)
    held = 2 * sum(one.trace.stages[stage].numel for stage in one.on_device)
    alone, both = one.prediction.device_parts, two.prediction.device_parts
    assert both["weight store"] == alone["weight store"]
    assert both["staging"] == alone["staging"] + 2 * block
    assert both["gradients"] < alone["gradients"], "they leave the device"
    assert two.prediction.host_parts["gradients"] >= one.prediction.host_parts["gradients"] + held
    assert two.prediction.step_parts["link"] > one.prediction.step_parts["link"]


def test_a_second_plan_leaves_room_for_the_stages_that_the_first_one_has_on_the_device():
    first = planned(3 * GIB)
    held = first.prediction.device_parts["weight store"]
    assert held > GIB
    second = request_for(3 * GIB, GIB)
    assert with_second_store(second, first).resources.device_memory == 3 * GIB - held
    unlimited = request_for(None, GIB)
    assert with_second_store(unlimited, first) == unlimited, "what is free is measured"


@pytest.mark.parametrize("limit", [3 * GIB, None])
def test_a_plan_for_a_larger_batch_keeps_the_tiers_of_the_store(limit, monkeypatch):
    first = planned(5 * GIB // 2)
    parts = first.prediction.device_parts
    # The planner asks for the free memory only if no limit is set. The first engine holds a part of it then.
    held = parts["weight store"] + parts["slabs"]
    monkeypatch.setattr("headwater.api.planner.free_device_bytes", lambda device: 3 * GIB - held)
    monkeypatch.setattr("headwater.api.planner.device_budget", lambda free: free)
    larger = request_for(limit, batch_size=64, fixed=Fixed(micro_batch_size=64))
    alone = make_plan(request_for(3 * GIB, batch_size=64, fixed=Fixed(micro_batch_size=64)))
    assert alone.on_device != first.on_device
    second = plan_for_store(larger, first)
    assert StoreSettings.of(second) == StoreSettings.of(first)
    assert second.on_device == first.on_device and len(first.on_device) > 5
    assert second.prediction.device_bytes <= 3 * GIB
    too_small = dataclasses.replace(larger, resources=Resources(held // 2, 64 * GIB))
    assert plan_for_store(too_small, first) is None


def test_a_store_with_other_gradient_sums_is_not_kept():
    first = planned(3 * GIB)
    accumulated = request_for(3 * GIB, batch_size=8, fixed=Fixed(micro_batch_size=4))
    assert plan_for_store(accumulated, first) is None, "sums of several micro-batches are in fp32"


@pytest.mark.parametrize("cluster", [SERVERS, WAFERS], ids=lambda cluster: cluster.name)
def test_simulated_clusters_have_no_stage_in_device_memory(cluster):
    assert not point(cluster, 1, 8).plan.on_device


def test_a_plan_counts_more_bytes_for_an_allocator_with_fixed_segments(monkeypatch):
    growing = planned(3 * GIB)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    fixed = planned(3 * GIB)
    for plan, share in ((growing, 0.06), (fixed, 0.2)):
        parts = plan.prediction.device_parts
        assert parts["allocator"] == int(share * (parts["activations"] + parts["gradients"]))
