"""Access to stages: due updates come first, other threads block, and a hook is called before changes."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from headwater.core.buffers import aligned_empty
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.update import Update

STAGES = [
    StageSpec(index, f"s{index}", (ParamSpec(f"w{index}", (6,), torch.float32, torch.float32),))
    for index in range(2)
]


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    def make_tier(own):
        return MemoryTier(own.layouts) if request.param == "memory" else DiskTier(own.layouts, tmp_path)

    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    made = build_store(STAGES, rule, make_tier, on_disk=range(len(STAGES)) if request.param == "disk" else ())
    for stage in range(2):
        made.parameters.write(stage, lambda piece: piece.master.zero_())
    yield made
    made.close()


def step(store, number=1):
    store.begin_step()
    for stage in range(2):
        store.add_gradient((stage, 0), torch.ones(6), last=True)
    store.end_micro_batch()
    return store.commit(Update(number, {"lr": 1.0}))


def image_of(store, stage, up_to=None):
    into = aligned_empty(store.tier.layouts[stage].wire_bytes)
    store.fetch(stage, into, up_to)
    return into[:24].view(torch.float32)


def test_a_fetch_applies_the_due_update_and_may_leave_a_later_one(store):
    step(store)
    assert torch.equal(image_of(store, 0, up_to=0), torch.zeros(6))
    assert torch.equal(image_of(store, 0), -torch.ones(6))
    assert 0 not in store.ledger and 1 in store.ledger


def test_a_version_grows_with_each_commit_and_each_write(store):
    before = store.version(0)
    step(store)
    after = store.version(0)
    image_of(store, 0)
    assert after > before and store.version(0) == after
    store.parameters.write_param((0, 0), torch.ones(6))
    assert store.version(0) > after


def test_reading_and_changing_come_after_the_due_update(store):
    step(store)
    with store.access.reading(0, None) as image:
        assert torch.equal(image[:24].view(torch.float32), -torch.ones(6))
    with store.access.changing(1) as image:
        image[:24].view(torch.float32).mul_(3)
    assert torch.equal(image_of(store, 1), -3 * torch.ones(6))


def test_a_replaced_stage_has_no_due_update(store):
    step(store)
    with store.access.replacing(0) as image:
        image[:24].view(torch.float32).fill_(7)
    assert 0 not in store.ledger
    assert torch.equal(image_of(store, 0), torch.full((6,), 7.0))


def test_the_hook_is_called_before_each_change_with_the_number_of_its_commit(store):
    seen = []
    store.access.before_update = lambda stage, number: seen.append((stage, number))
    step(store)
    store.flush_stage(1)
    store.parameters.write_param((0, 0), torch.ones(6))
    assert seen == [(1, 1), (0, 1), (0, 2)]


def test_undone_updates_are_not_applied(store):
    store.begin_transaction()
    step(store)
    assert store.roll_back()
    store.end_transaction()
    assert torch.equal(image_of(store, 0), torch.zeros(6))


def test_whole_parameters_are_read_and_written(store):
    store.parameters.write_param((1, 0), torch.arange(6.0))
    assert torch.equal(store.parameters.read_param((1, 0)), torch.arange(6.0))
    assert store.spec((1, 0)).name == "w1"
    store.scalars.by_stage[1] = [{"step": 3}]
    store.scalars.share()
    assert store.scalars.by_stage[1] == [{"step": 3}]


def test_a_roll_back_waits_for_an_update_that_another_thread_applies(store, monkeypatch):
    step(store)
    store.begin_transaction()
    apply, is_taken, may_continue = store.ledger.apply, threading.Event(), threading.Event()

    def pausing(stage):
        pending = apply(stage)
        is_taken.set()
        assert may_continue.wait(200)
        return pending

    monkeypatch.setattr(store.ledger, "apply", pausing)
    with ThreadPoolExecutor(2) as threads:
        applied = threads.submit(store.flush_stage, 0)
        assert is_taken.wait(200)
        undone = threads.submit(store.roll_back)
        wait([undone], timeout=0.2)
        may_continue.set()
        applied.result(20)
        assert undone.result(20)
    for stage in range(2):
        assert torch.equal(store.parameters.read_param((stage, 0)), -torch.ones(6))
