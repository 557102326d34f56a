"""Parts of a plan's memory: each byte of the store counts once, and gradients equal a replay of backward."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import gpt_trace

from headwater.core.precision import Precision
from headwater.plan.footprint import Footprint
from headwater.plan.predict import Predictor
from headwater.plan.types import Activations, Plan, Resources

LAYERS = 5
STAGES = LAYERS + 1  # a tied embedding, and the blocks


@st.composite
def plans(draw):
    """A plan for a small GPT: any place for each stage, any device, tier, policy and number of batches."""
    trace = gpt_trace(layers=LAYERS)
    device, tier = draw(st.sampled_from(["cpu", "cuda"])), draw(st.sampled_from(["memory", "disk"]))
    places = draw(st.lists(st.sampled_from(["device", "memory", "tier"]), min_size=STAGES, max_size=STAGES))
    return Plan(
        trace=trace,
        precision=Precision("bf16"),
        device=device,
        tier=tier,
        in_place=False,
        slabs=draw(st.integers(2, STAGES)),
        activations=tuple(draw(st.sampled_from(list(Activations))) for _ in range(STAGES)),
        micro_batch_size=1,
        num_micro_batches=draw(st.integers(1, 3)),
        gradient_tier=draw(st.sampled_from(["memory", "disk"])),
        in_memory=_at(places, "memory") if tier == "disk" else (),
        on_device=_at(places, "device") if device == "cuda" else (),
    )


def _at(places, name):
    return tuple(stage for stage, place in enumerate(places) if place == name)


def footprint(plan, **options):
    return Footprint(plan.trace, optimizer_state_bytes=8, base_bytes=0, **options)


@settings(deadline=None)
@given(plans())
def test_each_byte_of_the_store_is_in_one_place(plan):
    memory = footprint(plan).memory(plan)
    parts = (memory.device, memory.host, memory.disk)
    numel = sum(stage.numel for stage in plan.trace.stages)
    assert sum(part.get("weight store", 0) for part in parts) == 12 * numel


@settings(deadline=None)
@given(plans())
def test_every_gradient_waits_in_one_place(plan):
    gradients = footprint(plan).gradients
    each = [gradients.held(plan, stage) for stage in range(STAGES)]
    staying = gradients.staying(plan)
    assert gradients.all_held(plan) + sum(each[stage] for stage in staying) == sum(each)
    assert set(staying) == set(plan.on_device)
    assert gradients.arriving_sums(plan) == [], "one rank adds its gradients where they are"


@settings(deadline=None)
@given(plans())
def test_gradients_on_a_cpu_are_those_of_a_replayed_backward(plan):
    plan = dataclasses.replace(plan, device="cpu", on_device=(), gradient_tier="memory", num_micro_batches=1)
    sizes = [2 * stage.numel for stage in plan.trace.stages]
    uses, begun, complete, found = plan.trace.uses, set(), set(), []
    for place in reversed(range(len(uses))):
        stage, is_first = uses[place], uses.index(uses[place]) == place
        second = stage in begun  # autograd has a new summand beside the gradient of the later use
        begun.add(stage)
        found.append(sum(sizes[each] for each in begun | complete) + second * sizes[stage])
        if is_first:
            complete.add(stage)
    assert footprint(plan).gradients.alive(plan) == found[::-1]


@settings(deadline=None)
@given(plans(), st.integers(2, 4))
def test_activations_and_gradients_of_ranks_on_a_cpu_add_up(plan, ranks):
    plan = dataclasses.replace(plan, device="cpu", on_device=(), gradient_tier="memory", num_micro_batches=2)
    one, several = (footprint(plan, ranks=count).peak(plan) for count in (1, ranks))
    assert several.activations == ranks * one.activations
    assert several.gradients > one.gradients, "every rank has its own gradients beside the common sums"


@settings(deadline=None)
@given(plans(), st.booleans(), st.booleans())
def test_a_peak_does_not_depend_on_earlier_questions(plan, ranges, near_budget):
    plan = dataclasses.replace(plan, activations=(Activations.KEEP,) * STAGES)
    other = dataclasses.replace(
        plan,
        ranges=ranges,
        budget=Resources(host_memory=1) if near_budget else None,
        prediction=Predictor(footprint(plan)).predict(plan),
    )
    asked = footprint(plan)
    asked.peak(plan)
    assert asked.peak(other) == footprint(plan).peak(other)
