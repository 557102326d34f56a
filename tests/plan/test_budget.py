"""Plans are within every budget and never slower with more memory; refusals suggest settings that fit."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import gpt

from headwater.core.errors import ConfigError, DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import GIB, KIB, MIB, TIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.predict import NOMINAL
from headwater.plan.refusal import _least, enough, other_settings
from headwater.plan.search import LimitedRequest, best_plan, candidates, fits, usage
from headwater.plan.types import Activations, Budgets, Resources, StoreShare

SMALL = {"fp32": gpt(precision="fp32"), "bf16": gpt(), "fp16": gpt(precision="fp16", tied=False)}

sizes = st.integers(16, 26).flatmap(lambda power: st.integers(1 << power, 2 << power))
fixed_choices = st.builds(
    Fixed,
    tier=st.sampled_from([None, "memory"]),
    num_slabs=st.sampled_from([None, None, 2, 3]),
    activations=st.sampled_from([None, None, Activations.KEEP, Activations.RECOMPUTE]),
    micro_batch_size=st.sampled_from([None, None, 2]),
)
plan_requests = st.builds(
    PlanRequest,
    trace_for=st.sampled_from(sorted(SMALL)).map(SMALL.__getitem__),
    batch_size=st.sampled_from([2, 4, 6]),
    precision=st.just(Precision()),
    optimizer_state_bytes=st.sampled_from([0, 4, 8]),
    resources=st.builds(Resources, disk=st.sampled_from([None, Path("tier")])),
    device=st.sampled_from(["cpu", "cuda"]),
    calibration=st.sampled_from([None, dataclasses.replace(NOMINAL, link_bytes_per_s=1e8)]),
    fixed=fixed_choices,
    base_bytes=st.just(100 * KIB),
).map(lambda asked: dataclasses.replace(asked, precision=precision_of(asked)))
requests = st.builds(LimitedRequest, plan_requests, st.builds(Budgets, sizes, sizes, sizes))


def precision_of(asked):
    dtype = asked.trace_for(1).stages[0].params[0].wire_dtype
    return next(p for p in map(Precision, ("fp32", "bf16", "fp16")) if p.wire_dtype == dtype)


def with_fixed(plan):
    """Return the decisions of a plan that a user can fix."""
    return (plan.tier, plan.slabs, plan.micro_batch_size, plan.gradient_tier)


@settings(deadline=None, max_examples=150)
@given(requests)
def test_plans_stay_within_budgets_and_keep_fixed_decisions(request):
    plan = best_plan(request)
    assume(plan is not None)
    assert fits(plan, request)
    asked = request.asked
    assert plan.micro_batch_size * plan.num_micro_batches == asked.batch_size
    wanted = (asked.fixed.tier, asked.fixed.num_slabs, asked.fixed.micro_batch_size, None)
    assert all(want in (None, got) for want, got in zip(wanted, with_fixed(plan), strict=True))
    assert asked.resources.disk is not None or (plan.tier, plan.gradient_tier) == ("memory", "memory")
    assert plan.trace.micro_batch_size == plan.micro_batch_size


@settings(deadline=None, max_examples=150)
@given(requests)
def test_no_policy_that_a_refusal_leaves_out_needs_less_of_a_budget(request):
    assume(best_plan(request) is None)
    for size in request.asked.micro_batch_sizes():
        every = [usage(plan) for plan in candidates(request, size, smallest=True)]
        few = [usage(plan) for plan in candidates(request, size, smallest=True, every_policy=False)]
        assert len(few) <= len(every)
        for name in Budgets._fields:
            assert _least(few, request.budgets, (name,)) == _least(every, request.budgets, (name,)), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_budget_between_memory_and_disk_is_used_in_full(device):
    shape = gpt(layers=24, hidden=1024, tied=False)

    def planned(host_memory):
        resources = Resources(GIB, host_memory, disk=Path("tier"), disk_bytes=8 * GIB)
        options = {"device": device, "calibration": NOMINAL}
        return make_plan(PlanRequest(shape, resources=resources, **options, **ARGUMENTS))

    whole = planned(16 * GIB)
    assert whole.tier == "memory"
    stored = whole.prediction.host_parts["weight store"]
    plans = [planned(whole.prediction.host_bytes - share * stored // 8) for share in range(1, 8)]
    on_disk = [plan.prediction.disk_parts.get("weight store", 0) / stored for plan in plans]
    assert on_disk == sorted(on_disk)
    seconds = [plan.prediction.step_s for plan in plans]
    assert whole.prediction.step_s <= seconds[0]
    assert seconds == sorted(seconds)
    # A stage is moved whole, and a slab for it and staging buffers take memory too.
    assert all(part <= share / 8 + 0.15 for share, part in enumerate(on_disk, start=1)), on_disk


def test_several_ranks_keep_a_part_of_the_stages_in_memory():
    shape, options = gpt(layers=24, hidden=1024), {"calibration": NOMINAL}

    def planned(host_memory):
        resources = Resources(GIB, host_memory, disk=Path("tier"), disk_bytes=8 * GIB)
        return make_plan(PlanRequest(shape, resources=resources, ranks=2, **options, **ARGUMENTS))

    whole = planned(16 * GIB)
    stored = whole.prediction.host_parts["weight store"]
    plans = [planned(whole.prediction.host_bytes - share * stored // 8) for share in range(1, 8, 2)]
    seconds = [plan.prediction.step_s for plan in [whole, *plans]]
    assert seconds == sorted(seconds)
    mixed = [plan.prediction for plan in plans if plan.in_memory]
    assert mixed
    for found in mixed:
        parts = found.host_parts["weight store"], found.disk_parts["weight store"]
        assert sum(parts) == pytest.approx(stored, abs=2)


def test_a_disk_that_is_too_small_for_the_whole_store_is_enough_for_a_part():
    shape = gpt(layers=24, hidden=1024, tied=False)
    stored = make_plan(PlanRequest(shape, resources=Resources(host_memory=16 * GIB), **ARGUMENTS))
    half = stored.prediction.host_parts["weight store"] // 2
    base = stored.prediction.host_bytes - 2 * half
    resources = Resources(host_memory=base + int(1.3 * half), disk=Path("tier"), disk_bytes=int(1.1 * half))
    plan = make_plan(PlanRequest(shape, resources=resources, **ARGUMENTS))
    assert plan.in_memory
    assert plan.on_disk


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (3, 3), (9, 8), (99, 8)])
def test_a_fixed_number_of_stages_stays_in_memory(asked, found):
    resources = Resources(host_memory=4 * GIB, disk=Path("tier"), disk_bytes=GIB)
    fixed = Fixed(tier="disk", stages_in_memory=asked)
    plan = make_plan(PlanRequest(gpt(layers=8), resources=resources, fixed=fixed, **ARGUMENTS))
    assert len(plan.in_memory) == found


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_fixed_tier_holds_every_stage(tier):
    resources = Resources(host_memory=4 * GIB, disk=Path("tier"), disk_bytes=GIB)
    fixed = Fixed(tier=tier)
    plan = make_plan(PlanRequest(gpt(layers=8), resources=resources, fixed=fixed, **ARGUMENTS))
    assert not plan.in_memory
    assert len(plan.on_disk) == (len(plan.trace.stages) if tier == "disk" else 0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_disk_tier_without_a_limit_of_memory_has_few_slabs(inference):
    shape = gpt(layers=24, hidden=1024)

    def planned(**limits):
        def trace_for(size):
            return dataclasses.replace(shape(size), inference=inference)

        resources = Resources(disk=Path("tier"), disk_bytes=8 * GIB, **limits)
        fixed = Fixed(tier="disk", micro_batch_size=4)
        options = {"calibration": NOMINAL, "fixed": fixed, **ARGUMENTS, "batch_size": 4}
        return make_plan(PlanRequest(trace_for, resources=resources, **options))

    fastest, plan = planned(host_memory=16 * GIB), planned()
    assert plan.prediction.step_s <= 1.03 * fastest.prediction.step_s
    assert plan.prediction.host_bytes < fastest.prediction.host_bytes
    assert plan.slabs < fastest.slabs
    assert (plan.activations, plan.gradient_tier) == (fastest.activations, fastest.gradient_tier)
    assert plan.tier == "disk"


@settings(deadline=None, max_examples=150)
@given(requests, st.sampled_from(Budgets._fields), st.integers(1, 8 * MIB))
def test_more_memory_never_gives_a_slower_plan(request, name, more):
    larger = request.budgets._replace(**{name: getattr(request.budgets, name) + more})
    small, large = best_plan(request), best_plan(dataclasses.replace(request, budgets=larger))
    assume(small is not None)
    assert large is not None
    assert large.prediction.step_s <= small.prediction.step_s * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(requests)
def test_the_settings_that_a_refusal_suggests_fit(request):
    assume(best_plan(request) is None)
    for setting in (*enough(request), *other_settings(request)):
        assert best_plan(setting.request) is not None, setting.text


@settings(deadline=None, max_examples=60)
@given(requests)
def test_a_refusal_suggests_no_more_memory_than_needed(request):
    assume(best_plan(request) is None)
    for setting in enough(request):
        raised = setting.request.budgets
        changed = [n for n in Budgets._fields if getattr(raised, n) != getattr(request.budgets, n)]
        assume(len(changed) == 1)  # of two budgets, one may be lower where the other is rounded up
        less = raised._replace(**{changed[0]: int(getattr(raised, changed[0]) * 0.97)})
        assert best_plan(dataclasses.replace(request, budgets=less)) is None


ARGUMENTS = {
    "batch_size": 4,
    "precision": Precision("bf16"),
    "optimizer_state_bytes": 8,
    "base_bytes": 100 * KIB,
}


def test_a_model_that_fits_is_not_streamed_recomputed_or_split():
    plan = make_plan(PlanRequest(gpt(), resources=Resources(host_memory=GIB), **ARGUMENTS))
    assert (plan.tier, plan.in_place, plan.micro_batch_size) == ("memory", True, 4)
    assert set(plan.activations) == {Activations.KEEP}


def test_without_a_calibration_no_time_is_predicted():
    unmeasured = make_plan(PlanRequest(gpt(), resources=Resources(host_memory=GIB), **ARGUMENTS))
    measured = make_plan(
        PlanRequest(gpt(), resources=Resources(host_memory=GIB), calibration=NOMINAL, **ARGUMENTS)
    )
    assert unmeasured.prediction.step_s is None
    assert measured.prediction.step_s == pytest.approx(sum(measured.prediction.step_parts.values()))


def test_the_default_of_a_budget_is_the_free_memory(tmp_path):
    plan = make_plan(PlanRequest(gpt(), resources=Resources(disk=tmp_path / "tier"), **ARGUMENTS))
    assert plan.budget.host_memory > 100 * MIB
    assert plan.budget.disk_bytes > 0


def test_host_memory_decides_the_tier():
    shape = gpt(layers=12, hidden=256)
    disk = {"disk": Path("tier"), "disk_bytes": GIB}
    large = make_plan(PlanRequest(shape, resources=Resources(host_memory=GIB, **disk), **ARGUMENTS))
    small = make_plan(PlanRequest(shape, resources=Resources(host_memory=96 * MIB, **disk), **ARGUMENTS))
    assert (large.tier, small.tier) == ("memory", "disk")
    assert small.slabs >= 2


def test_stages_are_recomputed_one_by_one_as_memory_gets_short():
    shape, fixed = gpt(layers=12, hidden=256, length=512), Fixed(micro_batch_size=4)
    recomputed = [
        make_plan(PlanRequest(shape, resources=Resources(host_memory=room * MIB), fixed=fixed, **ARGUMENTS))
        .activations.count(Activations.RECOMPUTE)
        for room in (1000, 300, 250, 200)
    ]  # fmt: skip
    assert recomputed[0] == 0
    assert recomputed == sorted(set(recomputed))


def others(shape, fixed, host_memory, disk_bytes=GIB, **options):
    """Return the texts of the settings (not budgets) that a refusal suggests. Check that a plan fits each."""
    budgets = Budgets(options.pop("device_memory", GIB), host_memory, disk_bytes)
    resources = Resources(*budgets[:2], disk=Path("tier") if disk_bytes else None, disk_bytes=disk_bytes)
    asked = PlanRequest(shape, resources=resources, fixed=fixed, **options, **ARGUMENTS)
    request = LimitedRequest(asked, budgets)
    assert best_plan(request) is None
    found = list(other_settings(request))
    assert all(best_plan(setting.request) is not None for setting in found)
    return [setting.text for setting in found]


def test_a_refusal_suggests_fewer_stages_in_memory():
    fixed = Fixed(tier="disk", stages_in_memory=8)
    assert others(gpt(layers=8), fixed, 30_500_000) == ["stages_in_memory 3"]


def test_a_refusal_suggests_more_stages_on_the_device():
    fixed = Fixed(stages_on_device=2, micro_batch_size=4)
    sizes = {"device_memory": 6 * MIB, "disk_bytes": 0, "device": "cuda"}
    assert others(gpt(layers=8), fixed, 4 * MIB, **sizes)[0] == "stages_on_device 7"


def test_a_refusal_suggests_both_tiers_if_neither_has_room_for_all():
    shape = gpt(layers=24, hidden=1024, tied=False)
    plan = make_plan(PlanRequest(shape, resources=Resources(host_memory=16 * GIB), **ARGUMENTS))
    stored = plan.prediction.host_parts["weight store"]
    host_memory = plan.prediction.host_bytes - int(0.35 * stored)
    fixed = Fixed(tier="memory", micro_batch_size=4)
    assert others(shape, fixed, host_memory, int(0.55 * stored)) == ["tier auto"]


def test_a_refusal_suggests_updates_on_fetch_by_their_name():
    fixed = Fixed(tier="disk", updates="in_backward", micro_batch_size=1)
    assert "updates on_fetch" in others(gpt(layers=8), fixed, 28_600_000)


def test_a_refusal_names_the_exceeded_budget_and_settings_that_fit():
    small = Resources(device_memory=MIB, host_memory=GIB)
    fixed = Fixed(micro_batch_size=4, activations=Activations.KEEP)
    shape = gpt(layers=12, hidden=128, length=128)
    with pytest.raises(DoesNotFitError) as refused:
        make_plan(PlanRequest(shape, resources=small, device="cuda", fixed=fixed, **ARGUMENTS))
    assert "1.00 MiB of device memory" in refused.value.what
    assert "device_memory" in refused.value.remedy


def test_a_refusal_names_the_key_of_the_size_of_the_disk():
    resources = Resources(GIB, 16 * GIB, disk=Path("tier"), disk_bytes=MIB)
    with pytest.raises(DoesNotFitError) as refused:
        make_plan(PlanRequest(gpt(layers=2), resources=resources, fixed=Fixed(tier="disk"), **ARGUMENTS))
    assert "1.00 MiB of disk where" in refused.value.what
    assert "disk.size" in refused.value.remedy and "disk_bytes" not in refused.value.remedy


def test_refusal_offers_a_smaller_micro_batch():
    shape = gpt(layers=12, hidden=128, length=512, vocabulary=128)
    fixed = Fixed(micro_batch_size=4, activations=Activations.KEEP)
    room = Resources(host_memory=100 * MIB)
    with pytest.raises(DoesNotFitError, match="micro_batch_size 1"):
        make_plan(PlanRequest(shape, resources=room, fixed=fixed, **ARGUMENTS))


@pytest.mark.parametrize(
    ("fixed", "word"),
    [
        (Fixed(micro_batch_size=3), "for example 2"),
        (Fixed(tier="disk"), "set disk"),
        (Fixed(gradient_tier="disk"), "set disk"),
        (Fixed(activations=Activations.OFFLOAD), "recompute"),
        (Fixed(num_slabs=1), "write 2"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(fixed, word):
    with pytest.raises(ConfigError, match=word):
        make_plan(PlanRequest(gpt(), resources=Resources(host_memory=GIB), fixed=fixed, **ARGUMENTS))


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1]), (12, [12, 6, 3, 1]), (15, [15, 5, 1])])
def test_micro_batch_sizes_halve_at_least(batch_size, sizes):
    asked = PlanRequest(gpt(), resources=Resources(), **ARGUMENTS | {"batch_size": batch_size})
    assert asked.micro_batch_sizes() == sizes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_of_175_billion_parameters_is_planned(device):
    largest = gpt(layers=96, hidden=12288, vocabulary=50257, length=2048)
    resources = Resources(device_memory=80 * GIB, host_memory=64 * GIB, disk=Path("tier"), disk_bytes=4 * TIB)
    arguments = ARGUMENTS | {"batch_size": 16, "base_bytes": GIB}
    plan = make_plan(
        PlanRequest(largest, resources=resources, device=device, calibration=NOMINAL, **arguments)
    )
    assert plan.tier == "disk"
    assert plan.prediction.disk_bytes >= 12 * 175e9


def test_ranks_share_only_the_store_and_the_slabs_of_the_disk_tier():
    def plan(ranks, tier, **fixed):
        choices = Fixed(tier=tier, gradient_tier="memory", micro_batch_size=2, **fixed)
        resources = Resources(host_memory=1 * GIB, disk=Path("tier"), disk_bytes=1 * GIB)
        return make_plan(
            PlanRequest(
                SMALL["fp32"],
                batch_size=2,
                precision=Precision(),
                optimizer_state_bytes=8,
                resources=resources,
                fixed=choices,
                base_bytes=MIB,
                ranks=ranks,
            )
        )

    shared = {"memory": {"weight store", "snapshot"}, "disk": {"staging", "snapshot", "slabs"}}
    for tier, names in shared.items():
        one, three = (plan(ranks, tier, num_slabs=9).prediction.host_parts for ranks in (1, 3))
        for name in one.keys() - {"allocator", "activations", "gradients"}:
            assert three[name] == one[name] * (1 if name in names else 3), name
        assert three["activations"] > 2 * one["activations"]
        sums = sum(p.wire_bytes for s in SMALL["fp32"](2).stages for p in s.params if p.requires_grad)
        assert three["gradients"] >= sums, "they stay where they are added up"
    assert plan(3, "memory", num_slabs=2).slabs == 2, "each rank has its own"
    with pytest.raises(ConfigError, match="needs at least"):
        plan(3, "disk", num_slabs=2)


def test_ranks_with_separate_accelerators_share_no_device_memory():
    def plan(ranks, tier):
        return make_plan(
            PlanRequest(
                SMALL["fp32"],
                batch_size=2,
                precision=Precision(),
                optimizer_state_bytes=8,
                resources=Resources(device_memory=GIB, host_memory=GIB, disk=Path("tier"), disk_bytes=GIB),
                device="cuda",
                fixed=Fixed(tier=tier, num_slabs=2, activations=Activations.OFFLOAD),
                base_bytes=MIB,
                ranks=ranks,
            )
        ).prediction

    for tier, shared in {"memory": {"weight store", "snapshot"}, "disk": {"snapshot"}}.items():
        one, three = plan(1, tier), plan(3, tier)
        assert three.device_parts == one.device_parts
        for name in one.host_parts.keys() - {"gradients"}:
            assert three.host_parts[name] == one.host_parts[name] * (1 if name in shared else 3), name
        largest = max(stage.slab_bytes for stage in SMALL["fp32"](2).stages)
        arriving = three.host_parts["gradients"] - one.host_parts["gradients"]
        assert arriving == 3 * largest, "each has a stage's beside the sums, which are there once"
        assert three.disk_parts == one.disk_parts


def test_gradient_sums_that_hosts_exchange_stay_in_memory():
    held = [
        make_plan(
            PlanRequest(
                SMALL["fp32"],
                batch_size=2,
                precision=Precision(),
                optimizer_state_bytes=8,
                resources=Resources(host_memory=1 * GIB),
                fixed=Fixed(micro_batch_size=2, ranges=False),
                base_bytes=MIB,
                share=share,
            )
        ).prediction.host_parts["gradients"]
        for share in (StoreShare(), StoreShare(sums_stay=True))
    ]
    sums = sum(p.wire_bytes for s in SMALL["fp32"](2).stages for p in s.params if p.requires_grad)
    assert held[0] == sums < held[1], "gradients that arrive are added to sums which all exist"


def test_a_host_with_memory_for_only_one_of_three_ranks_is_refused():
    def plan(ranks, memory):
        return make_plan(
            PlanRequest(
                SMALL["fp32"],
                batch_size=2,
                precision=Precision(),
                optimizer_state_bytes=8,
                resources=Resources(host_memory=memory),
                base_bytes=100 * MIB,
                ranks=ranks,
            )
        )

    one = sum(plan(1, GIB).prediction.host_parts.values())
    three = sum(plan(3, GIB).prediction.host_parts.values())
    assert three - one > 200 * MIB
    with pytest.raises(DoesNotFitError):
        plan(3, one)
    assert sum(plan(3, three).prediction.host_parts.values()) <= three
