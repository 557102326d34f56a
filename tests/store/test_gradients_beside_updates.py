"""Gradients of one parameter are used while another thread updates another parameter of the same stage."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.update import Update

UPDATE = Update(1, {"lr": 1.0})
PARAMS = tuple(ParamSpec(name, (6,), torch.float32, torch.float32) for name in "ab")


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    options = GradientOptions(folder=tmp_path if request.param == "disk" else None)
    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    made = build_store(
        [StageSpec(0, "s", PARAMS)], rule, lambda own: MemoryTier(own.layouts), gradients=options
    )
    made.parameters.write(0, lambda piece: piece.master.zero_())
    made.begin_step()
    for param in range(2):
        made.add_gradient((0, param), torch.full((6,), float(1 + param)), last=True)
    made.end_micro_batch()
    yield made
    made.close()


def beside_the_update_of_a(store, monkeypatch, use):
    """Commit parameter `a`, and return what `use` returns while another thread updates `a`."""
    store.commit(UPDATE, {(0, 0): UPDATE})
    take, is_taken, may_continue = store._gradients.take, threading.Event(), threading.Event()

    def pausing(stage):
        found = take(stage)
        is_taken.set()
        assert may_continue.wait(200)
        return found

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as threads:
        patched.setattr(store._gradients, "take", pausing)
        applied = threads.submit(store.flush_stage, 0)
        assert is_taken.wait(200)
        threading.Timer(0.2, may_continue.set).start()
        found = use()
        applied.result(20)
    assert torch.equal(store.parameters.read_param((0, 0)), -torch.ones(6))
    return found


def test_a_gradient_is_read(store, monkeypatch):
    found = beside_the_update_of_a(store, monkeypatch, lambda: store.borrow_gradient((0, 1)))
    assert torch.equal(found, torch.full((6,), 2.0))


def test_a_gradient_is_dropped(store, monkeypatch):
    beside_the_update_of_a(store, monkeypatch, lambda: store.drop_gradient((0, 1)))
    store.add_gradient((0, 1), torch.ones(6), last=True)
    assert torch.equal(store.borrow_gradient((0, 1)), torch.ones(6))


def test_a_gradient_is_replaced(store, monkeypatch):
    beside_the_update_of_a(store, monkeypatch, lambda: store.set_gradient((0, 1), torch.zeros(6)))
    assert torch.equal(store.borrow_gradient((0, 1)), torch.zeros(6))


def test_a_gradient_that_was_read_is_committed(store, monkeypatch):
    store.borrow_gradient((0, 1)).mul_(3)
    committed = beside_the_update_of_a(store, monkeypatch, lambda: store.commit(UPDATE, {(0, 1): UPDATE}))
    assert committed.gradient_norm == pytest.approx(6 * 6**0.5)
    assert torch.equal(store.parameters.read_param((0, 1)), torch.full((6,), -6.0))
