"""Building a store: its gradients, its layouts and its ranks follow from the options."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from thread_fabric import ranks
from thread_hosts import hosts

from headwater.core.errors import StoreError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import ALONE
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store, make_gradients
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule, stage_layout

STAGES = [StageSpec(i, f"s{i}", (ParamSpec(f"w{i}", (8,), torch.float32, torch.float32),)) for i in range(2)]
USER_LOOP = GradientOptions(user_loop=True)


def built(fabric, gradients=None):
    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    return build_store(
        STAGES, rule, lambda own: MemoryTier(own.layouts, fabric=fabric), gradients=gradients, fabric=fabric
    )


def kind_and_owners(fabric, gradients):
    store = built(fabric, gradients)
    found = type(store.gradients).__name__, store.fabric.size, sorted(store.ownership.owners(0))
    fabric.barrier("the end")
    store.close()
    return found


@pytest.mark.parametrize("gradients", [None, USER_LOOP])
def test_a_single_rank_owns_all_and_sums_in_its_own_memory(gradients):
    assert kind_and_owners(ALONE, gradients) == ("LocalGradients", 1, [0])


def test_ranks_of_one_host_share_the_updates():
    for gradients, kind in ((None, "RankGradients"), (USER_LOOP, "LoopGradients")):
        found = ranks(2, lambda fabric, gradients=gradients: kind_and_owners(fabric, gradients))
        assert found == [(kind, 2, [0, 1])] * 2


def test_each_host_has_all_weights_only_in_a_user_loop():
    assert hosts(2, lambda fabric: kind_and_owners(fabric, None)) == [("HostGradients", 2, [0, 1])] * 2
    assert hosts(2, lambda fabric: kind_and_owners(fabric, USER_LOOP)) == [("LoopGradients", 1, [0])] * 2


def test_the_tier_has_the_layouts_of_the_stages():
    store = built(ALONE)
    assert [layout.stage for layout in store.tier.layouts] == STAGES
    assert list(store.parameters.read_param((1, 0)).shape) == [8]
    store.close()


@pytest.mark.parametrize("gradients", [None, USER_LOOP])
def test_a_closed_store_has_closed_its_connections_to_other_hosts(gradients):
    def program(fabric):
        kind_and_owners(fabric, gradients)
        return fabric.links

    for links in hosts(2, program):
        assert links and all(link.is_closed for link in links)


def open_files_in(folder):
    descriptors = Path("/proc/self/fd").iterdir()
    return [path for path in descriptors if path.is_symlink() and str(folder) in str(path.readlink())]


def test_the_files_of_the_weights_are_closed_if_gradients_have_no_room(tmp_path):
    def build(gradients):
        rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
        make_tier = lambda own: DiskTier(own.layouts, tmp_path / "weights")  # noqa: E731
        return build_store(STAGES, rule, make_tier, on_disk=range(len(STAGES)), gradients=gradients)

    store = build(None)
    assert open_files_in(tmp_path)
    store.close()
    with pytest.raises(StoreError):
        build(GradientOptions(folder=tmp_path / "missing"))
    assert not open_files_in(tmp_path)


def test_the_files_of_a_disk_tier_are_closed_if_memory_for_its_buffers_is_missing(tmp_path, monkeypatch):
    def fail(num_bytes):
        raise MemoryError

    layout = stage_layout(STAGES[0], UpdateRule(OptimizerSpec("SGD", {"lr": 1.0})))
    monkeypatch.setattr("headwater.store.disk.aligned_empty", fail)
    with pytest.raises(MemoryError):
        DiskTier([layout], tmp_path)
    assert not open_files_in(tmp_path)


def test_sums_are_unlocked_if_memory_for_their_counters_is_missing():
    locked = []

    def page_lock(memory):
        locked.append(memory)
        return locked.clear

    def program(fabric):
        allocate, calls = fabric.allocate, itertools.count()

        def fail_later(num_bytes):
            if next(calls):
                raise MemoryError
            return allocate(num_bytes)

        fabric.allocate = fail_later
        with pytest.raises(MemoryError):
            make_gradients(STAGES, fabric, lambda *_: range(8), GradientOptions(page_lock=page_lock))

    ranks(2, program)
    assert not locked


def test_a_store_closes_its_files_also_if_a_gradient_on_its_way_has_failed(tmp_path):
    def fail():
        raise StoreError("a gradient has failed")

    store = build_store(
        STAGES,
        UpdateRule(OptimizerSpec("SGD", {"lr": 1.0})),
        lambda own: DiskTier(own.layouts, tmp_path),
        on_disk=range(len(STAGES)),
    )
    store.await_gradients = fail
    with contextlib.suppress(StoreError):
        store.close()
    assert not open_files_in(tmp_path)
