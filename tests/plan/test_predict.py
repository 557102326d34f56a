"""Predicted bytes and seconds equal sums done by hand."""

import dataclasses

import pytest
from synthetic import gpt_trace

from headwater.core.precision import Precision
from headwater.core.units import MIB
from headwater.plan.footprint import Footprint
from headwater.plan.memory.activations import recomputable
from headwater.plan.memory.slabs import minimum_slabs
from headwater.plan.predict import USE_OVERHEAD_S, Predictor
from headwater.plan.rates import Calibration
from headwater.plan.stage_times import OPERATOR_S
from headwater.plan.types import Activations, Plan, Resources

RATES = Calibration(
    fp32_flops_per_s=1e9,
    bf16_flops_per_s=1e9,
    fp16_flops_per_s=1e9,
    fp32_saved_bytes_per_s=1e30,
    bf16_saved_bytes_per_s=1e30,
    fp16_saved_bytes_per_s=1e30,
    memory_bytes_per_s=1e30,
    adamw_params_per_s=1e30,
    link_bytes_per_s=1e6,
    disk_read_bytes_per_s=1e6,
    disk_write_bytes_per_s=5e5,
)


def make(trace, **changes):
    plan = Plan(
        trace=trace,
        precision=Precision("bf16"),
        device="cpu",
        tier="memory",
        in_place=False,
        slabs=len(trace.stages),
        activations=(Activations.KEEP,) * len(trace.stages),
        micro_batch_size=trace.micro_batch_size,
        num_micro_batches=1,
        gradient_tier="memory",
    )
    return dataclasses.replace(plan, **changes)


def predict(plan, rates=RATES, state=8):
    footprint = Footprint(plan.trace, optimizer_state_bytes=state, base_bytes=0)
    return Predictor(footprint, rates).predict(plan)


def numel(trace):
    return sum(stage.numel for stage in trace.stages)


def with_phases(trace, change):
    """Return a dry run with other costs of operators.

    Args:
        trace: the dry run.
        change: FLOPs of a stage's forward -> the changed fields of its forward, and those of its backward.
    """

    def changed(cost):
        forward, backward = change(cost.forward.flops)
        return dataclasses.replace(
            cost,
            forward=dataclasses.replace(cost.forward, **forward),
            backward=dataclasses.replace(cost.backward, **backward),
        )

    return dataclasses.replace(trace, costs=tuple(map(changed, trace.costs)))


def test_updates_in_backward_run_beside_the_backward():
    """On a GPU the host updates beside the first forward, or beside the backward, which is longer.

    If updates take longer than the forward, only the stages after the last update are computed after them.
    """
    trace = gpt_trace()
    seconds = Predictor(Footprint(trace, optimizer_state_bytes=8, base_bytes=0), RATES).stage_times.of(
        make(trace)
    )
    backward = sum(stage.backward for stage in seconds) + USE_OVERHEAD_S * len(trace.uses)
    fast_link = dataclasses.replace(RATES, link_bytes_per_s=1e30)
    for updates_s in (0.9 * backward, 2 * backward):
        rates = dataclasses.replace(fast_link, adamw_params_per_s=numel(trace) / updates_s)
        steps = {
            updates: predict(make(trace, device="cuda", precision=Precision("fp32"), updates=updates), rates)
            for updates in ("on_fetch", "in_backward")
        }
        found = {updates: prediction.step_parts for updates, prediction in steps.items()}
        compute, update = (found["on_fetch"][name] for name in ("compute", "update"))
        assert found["in_backward"]["update"] == update
        forward = compute - backward
        last_update = max(trace.first_use.values())
        after = sum(seconds[stage].forward / trace.uses.count(stage) for stage in trace.uses[last_update:])
        assert update > forward
        read = update * 2 / 26  # an update moves 26 bytes a parameter, and the copy to the GPU reads 2
        assert steps["on_fetch"].step_s == pytest.approx(update + read + after + backward, rel=0.01)
        assert steps["in_backward"].step_s == pytest.approx(forward + max(backward, update), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "state", "bytes_per_param"),
    [("fp32", 8, 12), ("bf16", 8, 12), ("fp16", 8, 14), ("bf16", 4, 8), ("fp32", 0, 4)],
)
def test_store_bytes_are_masters_wire_copies_and_state(precision, state, bytes_per_param):
    plan = make(gpt_trace(precision=precision), in_place=True, precision=Precision(precision))
    prediction = predict(plan, state=state)
    assert prediction.host_parts["weight store"] == bytes_per_param * numel(plan.trace)
    assert prediction.host_parts["slabs"] == 0


def test_on_disk_only_staging_stays_in_memory():
    plan = make(gpt_trace(layers=12, hidden=512), tier="disk", slabs=2)
    prediction = predict(plan)
    assert prediction.disk_bytes == 12 * numel(plan.trace)
    assert "weight store" not in prediction.host_parts
    assert prediction.host_parts["staging"] < 100 * MIB
    assert prediction.host_parts["slabs"] == sum(plan.trace.stages[i].slab_bytes for i in (0, 1, 2))


def test_gradients_are_counted_beside_the_pages_that_the_allocator_keeps():
    trace = gpt_trace(layers=12, hidden=256, length=512, tied=False)
    whole = sum(cost.saved_bytes for cost in trace.costs)
    ample = make(trace)
    one = predict(ample).host_parts
    near_budget = dataclasses.replace(ample, budget=Resources(host_memory=1), prediction=predict(ample))
    returned = predict(near_budget).host_parts
    several = predict(make(trace, num_micro_batches=2)).host_parts
    assert min(one["activations"], returned["activations"]) >= whole
    assert one["gradients"] == 2 * numel(trace)  # when they have arrived, the pages of activations remain
    assert returned["gradients"] < one["gradients"]  # at the turn to backward only the head's gradient exists
    assert several["gradients"] >= 4 * numel(trace)  # sums wait while the next forward runs


def test_recomputing_trades_bytes_for_time():
    trace = gpt_trace(layers=12, hidden=256, length=2048)
    blocks = (Activations.KEEP, *(Activations.RECOMPUTE,) * 12)
    kept, recomputed = predict(make(trace)), predict(make(trace, activations=blocks))
    saved = trace.costs[1].saved_bytes
    assert kept.host_parts["activations"] - recomputed.host_parts["activations"] >= 10 * saved
    again = sum(cost.forward.flops for cost in trace.costs[1:]) / RATES.bf16_flops_per_s
    assert recomputed.step_s - kept.step_s == pytest.approx(again)


def test_new_pages_take_time_where_the_allocator_returns_pages():
    trace = gpt_trace()
    large = with_phases(trace, lambda flops: ({"new_bytes": 300}, {"new_bytes": 500}))
    rates = dataclasses.replace(RATES, new_bytes_per_s=100.0)
    count = len(trace.costs)
    again = (Activations.RECOMPUTE,) * count

    def added(plan, rates):
        return predict(dataclasses.replace(plan, trace=large), rates).step_s - predict(plan, rates).step_s

    near_budget = make(trace, budget=Resources(host_memory=1), prediction=predict(make(trace)))
    assert added(near_budget, rates) == pytest.approx(8 * count)
    assert added(make(trace, activations=again), rates) == pytest.approx(11 * count)
    assert added(make(trace), rates) == 0  # pages are kept
    assert added(make(trace, activations=again, device="cuda"), rates) == 0
    assert added(near_budget, RATES) == 0  # not measured


def test_calls_of_operators_take_time_on_a_cpu():
    trace = gpt_trace()
    many = with_phases(trace, lambda flops: ({"operators": 7}, {"operators": 11}))
    for device, calls in (("cpu", 18 * len(trace.costs)), ("cuda", 0)):
        step_s = [predict(make(each, device=device)).step_parts["compute"] for each in (trace, many)]
        assert step_s[1] - step_s[0] == pytest.approx(calls * OPERATOR_S)


def test_sums_of_gradients_take_time_with_several_micro_batches():
    trace = gpt_trace()
    rates = dataclasses.replace(RATES, memory_bytes_per_s=1e3)
    for count, moved in ((1, 0), (2, 2 * 2 + 3 * 4), (3, 3 * 2 + 5 * 4)):
        plan = make(trace, num_micro_batches=count, in_place=True)
        slow, fast = (predict(plan, each).step_parts["compute"] for each in (rates, RATES))
        assert slow - fast == pytest.approx(moved * numel(trace) / 1e3)


def test_disk_traffic_of_a_step_equals_the_sum_by_hand():
    # With a slab for each stage: 12 bytes a parameter in, 12 out. With two, backward reads blocks again.
    trace = gpt_trace(layers=6, tied=False)
    read, write = RATES.disk_read_bytes_per_s, RATES.disk_write_bytes_per_s
    whole = 12 * numel(trace) * (1 / read + 1 / write)
    assert predict(make(trace, tier="disk")).step_parts["disk"] == pytest.approx(whole)
    again = 4 * trace.stages[1].slab_bytes / read
    few = predict(make(trace, tier="disk", slabs=2)).step_parts["disk"]
    assert few == pytest.approx(whole + again)


def test_gradients_on_disk_are_written_and_read_once():
    trace = gpt_trace(layers=6)
    parts = predict(make(trace, gradient_tier="disk", in_place=True))
    assert parts.disk_bytes == 2 * numel(trace)
    assert parts.step_parts["disk"] == pytest.approx(2 * numel(trace) * (1e-6 + 2e-6))


def test_link_carries_weights_down_and_gradients_up():
    trace = gpt_trace(layers=6, tied=False)
    prediction = predict(make(trace, device="cuda"))
    assert prediction.step_parts["link"] == pytest.approx((2 + 2) * numel(trace) / RATES.link_bytes_per_s)
    assert prediction.device_bytes > 2 * numel(trace)
    assert prediction.host_bytes == (12 + 2) * numel(trace)


def test_activations_that_leave_a_gpu_take_time_in_the_first_forward():
    trace = gpt_trace(layers=6, tied=False)
    offloaded = (Activations.OFFLOAD,) * len(trace.stages)
    plan = make(trace, device="cuda", on_device=tuple(range(len(trace.stages))), activations=offloaded)
    moved = Footprint(trace, optimizer_state_bytes=8, base_bytes=0).offloaded_bytes(plan)
    # Out in the forward, and back in the backward.
    assert predict(plan).step_s >= 2 * moved / RATES.link_bytes_per_s


def test_a_step_takes_no_less_than_its_largest_part_and_no_more_than_all():
    for changes in ({}, {"tier": "disk", "slabs": 2}, {"device": "cuda"}, {"num_micro_batches": 3}):
        prediction = predict(make(gpt_trace(layers=6), **changes))
        parts = {name: s for name, s in prediction.step_parts.items() if name != "overlap"}
        assert max(parts.values()) <= prediction.step_s
        assert prediction.step_s <= sum(parts.values()) * 1.5


def test_stages_used_together_need_slabs_at_once():
    trace = gpt_trace(layers=4)
    assert minimum_slabs(trace) == 2
    nested = dataclasses.replace(trace, sites={"blocks": (1, 2, 3), "blocks.3": (4,)})
    assert minimum_slabs(nested) == 4


def test_only_tensors_saved_within_one_module_can_be_recomputed():
    # The head also reads the tied embedding, so recomputing the embedding frees nothing that the head saved.
    trace = gpt_trace(layers=2)
    costs = tuple(dataclasses.replace(cost, recomputable=True) for cost in trace.costs)
    assert recomputable(dataclasses.replace(trace, costs=costs)) == [False, True, True]


def test_attention_has_its_own_rate():
    trace = with_phases(
        gpt_trace(), lambda flops: ({"attention_flops": flops // 2}, {"attention_flops": flops // 4})
    )
    slow = dataclasses.replace(RATES, bf16_attention_flops_per_s=RATES.bf16_flops_per_s / 10)
    forwards = [cost.forward.flops for cost in trace.costs]
    extra = sum(9 * (flops // 2 + flops // 4) for flops in forwards) / RATES.bf16_flops_per_s
    seconds = [predict(make(trace), rates).step_parts["compute"] for rates in (RATES, slow)]
    assert seconds[1] - seconds[0] == pytest.approx(extra)


def test_the_kernel_of_attention_has_its_own_rate_or_that_of_torchs_attention():
    trace = with_phases(
        gpt_trace(),
        lambda flops: ({"kernel_attention_flops": flops // 2}, {"kernel_attention_flops": flops // 4}),
    )
    rate = RATES.bf16_flops_per_s
    flops = sum(cost.forward.flops // 2 + cost.forward.flops // 4 for cost in trace.costs)
    slow = dataclasses.replace(RATES, bf16_attention_flops_per_s=rate / 10)
    known = dataclasses.replace(slow, kernel_attention_flops_per_s=rate / 2)
    seconds = [predict(make(trace), rates).step_parts["compute"] for rates in (RATES, slow, known)]
    assert seconds[1] - seconds[0] == pytest.approx(9 * flops / rate)
    assert seconds[2] - seconds[0] == pytest.approx(flops / rate)
