"""Simulated steps against the planner's prediction, and against sums done by hand."""

import dataclasses
import math
from itertools import pairwise

import pytest
from clusters import (
    BOXES,
    CLUSTERS,
    CORES,
    GB,
    SERVERS,
    SERVERS_AND_STORE,
    SMALL,
    WAFERS,
    point,
    with_host,
    with_network,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import gpt_trace

from headwater.core.errors import ConfigError, DoesNotFitError
from headwater.core.precision import Precision
from headwater.plan.cluster.parts import mean_parts
from headwater.plan.cluster.types import Accelerator, place
from headwater.plan.options import Fixed
from headwater.plan.types import Activations

BATCH = 16
INFINITE = 1e30
WEIGHTS = sum(stage.slab_bytes for stage in gpt_trace(**SMALL).stages)  # in bf16; gradients are as many


def fixed(**decisions):
    return {"fixed": Fixed(micro_batch_size=4, activations=Activations.KEEP, **decisions)}


# one CSX: what `headwater plan` predicts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, SMALL | {"tied": False, "layers": 2}], ids=["tied", "untied"])
def test_one_csx_without_streaming_takes_the_predicted_time(precision, shape):
    one = point(BOXES, 1, BATCH, shape, precision=Precision(precision), **fixed())
    assert one.plan.in_place
    assert one.step.step_s == pytest.approx(one.plan.prediction.step_s, rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "decisions", "tolerance"),
    [
        (BOXES, {"num_slabs": 3}, 0.05),
        (BOXES, {"tier": "disk"}, 0.05),
        (BOXES, {"tier": "disk", "gradient_tier": "disk", "num_slabs": 3}, 0.05),
        # Limited by its link, which sometimes waits for a slab. The prediction has that in the forward alone.
        (SERVERS, {"num_slabs": 3}, 0.12),
        (SERVERS, {}, 0.05),
        (BOXES, {"num_slabs": 3, "updates": "in_backward"}, 0.05),
        # Simulated steps end with the update of the first stage; the prediction has that beside the next one.
        (BOXES, {"tier": "disk", "updates": "in_backward"}, 0.12),
        (SERVERS, {"updates": "in_backward"}, 0.1),
    ],
    ids=[
        "slabs",
        "disk",
        "gradients on disk",
        "accelerator and slabs",
        "accelerator",
        "in backward and slabs",
        "in backward and disk",
        "in backward and accelerator",
    ],
)
def test_one_streaming_csx_takes_about_the_predicted_time(cluster, decisions, tolerance):
    shape = SMALL | {"layers": 24}
    one = point(cluster, 1, BATCH, shape, **fixed(**decisions))
    assert one.step.step_s == pytest.approx(one.plan.prediction.step_s, rel=tolerance)


# many


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_with_infinite_bandwidth_only_computation_takes_time(cluster):
    memory = dataclasses.replace(cluster.host.memory, bytes_per_s=INFINITE, adamw_params_per_s=INFINITE)
    accelerator = cluster.host.accelerator
    if accelerator is not None and accelerator.link_bytes_per_s is not None:
        accelerator = Accelerator(accelerator.memory_bytes, INFINITE)
    cluster = with_network(cluster, bytes_per_s=INFINITE, latency_s=0.0)
    cluster = with_host(cluster, memory=memory, accelerator=accelerator)
    if cluster.store is not None:
        cluster = dataclasses.replace(cluster, store=dataclasses.replace(cluster.store, memory=memory))
    eight = point(cluster, 8, 64, **fixed())
    compute_s = eight.plan.prediction.step_parts["compute"]
    assert eight.step.step_s == pytest.approx(compute_s, rel=1e-6)
    assert eight.parts["compute"] == pytest.approx(compute_s, rel=1e-6)


def moved(simulated):
    """Return the bytes that each link carries."""
    timeline = simulated.step.timeline
    return {
        " ".join(words): timeline.bytes_over(number)
        for number, words in enumerate(timeline.resources)
        if "network" in words[1] or "link" in words[1] or "level" in words[1]
    }


@pytest.mark.parametrize("hosts", [2, 3, 16])
def test_a_host_exchanges_the_weights_and_gradients_of_other_owners(hosts):
    over = moved(point(BOXES, 2 * hosts, 16 * hosts, **fixed()))
    expected = 2 * WEIGHTS * (hosts - 1) / hosts
    assert over == pytest.approx({"host network out": expected, "host network in": expected})


def test_accelerators_fetch_weights_once_for_each_pass_where_few_fit_and_send_every_gradient():
    few = point(SERVERS, 4, 64, **fixed(num_slabs=2))
    micro_batches = few.plan.num_micro_batches
    over = moved(few)
    assert micro_batches == 4
    # Two slabs hold two of six blocks, so each pass fetches four again; the first pass fetches all six.
    block = few.plan.trace.stages[1].slab_bytes
    fetched = WEIGHTS + (2 * micro_batches - 1) * 4 * block
    for rank in range(4):
        assert over[f"host link {rank} in"] == pytest.approx(fetched)
        assert over[f"host link {rank} out"] == pytest.approx(micro_batches * WEIGHTS)


def test_store_hosts_divide_the_traffic():
    over = moved(point(SERVERS_AND_STORE, 32, 128, **fixed()))
    hosts, owners = 8, SERVERS_AND_STORE.store.count
    for way in ("in", "out"):
        assert over[f"host network {way}"] == pytest.approx(WEIGHTS)
        assert over[f"store network {way}"] == pytest.approx(WEIGHTS * hosts / owners)


def test_switches_carry_weights_and_gradients_once_for_any_number_of_systems():
    for number, levels in ((4, 1), (16, 2), (64, 3)):
        over = moved(point(WAFERS, number, 4 * number, **fixed()))
        assert over["host network out"] == pytest.approx(WEIGHTS)  # one micro-batch
        assert over["store network in"] == pytest.approx(WEIGHTS / WAFERS.store.count)
        fetched = over["host network in"]
        assert fetched >= WEIGHTS
        assert over["store network out"] == pytest.approx(fetched / WAFERS.store.count)
        for level in range(1, levels):
            assert over[f"switches level {level} down"] == pytest.approx(fetched)
            assert over[f"switches level {level} up"] == pytest.approx(WEIGHTS)
        assert f"switches level {levels} up" not in over


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cluster=st.sampled_from(CLUSTERS),
    num_csx=st.sampled_from([1, 2, 4, 8, 32, 128]),
    slabs=st.sampled_from([None, 2, 4]),
    micro=st.sampled_from([1, 2]),
    bytes_per_s=st.floats(1e6, 1e12),
    slower=st.floats(1.0, 100.0),
)
def test_no_resource_is_used_twice_at_once_and_slower_links_take_longer(
    cluster, num_csx, slabs, micro, bytes_per_s, slower
):
    decisions = {"fixed": Fixed(micro_batch_size=micro, activations=Activations.KEEP, num_slabs=slabs)}
    fast, slow = (
        point(with_network(cluster, bytes_per_s=rate), num_csx, 2 * num_csx, **decisions)
        for rate in (bytes_per_s, bytes_per_s / slower)
    )
    timeline = fast.step.timeline
    for resource in range(len(timeline.resources)):
        own = [timeline.tasks[number] for number in timeline.of(resource)]
        assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(own))
    assert slow.step.step_s >= fast.step.step_s
    assert sum(fast.parts.values()) == pytest.approx(fast.step.step_s)
    assert fast.parts == mean_parts(timeline, fast.step.ranks)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_every_rank_computes_every_use_of_every_micro_batch_in_order(cluster):
    simulated = point(cluster, 8, 64, **fixed())
    timeline, plan = simulated.step.timeline, simulated.plan
    for rank in simulated.step.ranks:
        own = [timeline.tasks[number] for number in timeline.of(rank)]
        stages = [task.stage for task in own if task.name in ("forward", "backward")]
        assert stages == [*plan.trace.schedule] * plan.num_micro_batches


def test_a_slow_network_limits_a_step():
    hosts = 8
    slow = point(with_network(BOXES, bytes_per_s=1e6), 2 * hosts, 8 * hosts, **fixed())
    least = 2 * WEIGHTS * (hosts - 1) / hosts / 1e6
    assert least < slow.step.step_s < 1.1 * least
    assert slow.parts["broadcast"] + slow.parts["reduce"] > 0.9 * least


def test_offloaded_activations_are_written_and_read():
    decisions = {"fixed": Fixed(micro_batch_size=4, activations=Activations.OFFLOAD)}
    one = point(SERVERS, 1, 4, **decisions)
    kept = sum(cost.saved_bytes + cost.input_bytes for cost in one.plan.trace.costs)
    over = moved(one)
    assert over["host link 0 out"] == pytest.approx(kept + WEIGHTS)
    assert over["host link 0 in"] == pytest.approx(kept + WEIGHTS)
    on_disk = point(BOXES, 1, 4, **decisions)
    assert on_disk.step.step_s > point(BOXES, 1, 4, **fixed()).step.step_s


# placement on hosts


def test_ranks_fill_hosts():
    assert [(p.hosts, p.ranks) for p in (place(BOXES, n) for n in (1, 2, 4, 1024))] == [
        (1, 1), (1, 2), (2, 2), (512, 2),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="got 1025"):
        place(BOXES, 1025)
    with pytest.raises(ConfigError, match="cannot be divided evenly") as refused:
        place(BOXES, 3)
    assert refused.value.remedy == "write 2 or 4"


def test_a_model_too_large_for_one_host_fits_on_several():
    small = dataclasses.replace(CORES.memory, size_bytes=3 * GB)
    cluster = with_host(BOXES, memory=small, disk=None)
    shape = SMALL | {"layers": 24}  # 208 M parameters: 0.4 GB of weights, 2 GB of masters and state
    with pytest.raises(DoesNotFitError):
        point(cluster, 2, 4, shape)
    assert point(cluster, 16, 32, shape).plan.tier == "memory"


def test_a_store_that_is_too_small_is_refused():
    tiny = dataclasses.replace(
        WAFERS.store, memory=dataclasses.replace(WAFERS.store.memory, size_bytes=10**8)
    )
    with pytest.raises(DoesNotFitError, match="each of 4 hosts of the weight store needs"):
        point(dataclasses.replace(WAFERS, store=tiny), 4, 16)


# claims in the documents of a wafer-scale cluster


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 14, "hidden": 1088},  # 256 M
        {"layers": 24, "hidden": 2048},  # 1.3 B
        {"layers": 32, "hidden": 4096},  # 6.7 B
        {"layers": 44, "hidden": 6144, "tied": False},  # 20 B
    ],
    ids=["256M", "1.3B", "6.7B", "20B"],
)
def test_gpts_scale_nearly_linearly_over_sixteen_systems(shape):
    each = 60
    shape = {"vocabulary": 50257, "length": 2048} | shape
    one, sixteen = (point(WAFERS, number, each * number, shape) for number in (1, 16))
    assert sixteen.samples_per_s > 0.95 * 16 * one.samples_per_s


def test_a_thousand_csx_train_a_model_of_400_billion_parameters():
    shape = {"layers": 126, "hidden": 16384, "vocabulary": 128256, "length": 4096, "tied": False}
    host = dataclasses.replace(SERVERS.host, accelerator=Accelerator(140 * GB, 6e10))
    roomy = with_host(
        SERVERS, **vars(host) | {"memory": dataclasses.replace(host.memory, size_bytes=4000 * GB)}
    )
    thousand = point(roomy, 1024, 1024, shape)
    assert math.isfinite(thousand.step.step_s)
    assert thousand.step.step_s > thousand.parts["compute"] > 1.0
