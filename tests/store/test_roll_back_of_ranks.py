"""Ranks undo a step while a thread of one of them applies an update. The ranks are threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from thread_fabric import ranks

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.update import Update

UPDATE = Update(1, {"lr": 1.0})
SIZE = 2
STAGES = [
    StageSpec(index, f"s{index}", tuple(
        ParamSpec(f"{name}{index}", (6,), torch.float32, torch.float32) for name in "ab"
    ))
    for index in range(2)
]  # fmt: skip


def make_store(fabric):
    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    store = build_store(
        STAGES,
        rule,
        lambda own: MemoryTier(own.layouts, fabric=fabric),
        gradients=GradientOptions(user_loop=True),
        fabric=fabric,
    )
    for stage in range(len(STAGES)):
        store.parameters.write(stage, lambda piece: piece.master.zero_())
    return store


def step(store):
    for stage in range(len(STAGES)):
        for param in range(2):
            store.add_gradient((stage, param), torch.ones(6), last=True)
    store.end_micro_batch()
    store.commit(UPDATE)


class Pause:
    """A call that waits, on the first rank, until the test continues."""

    def __init__(self, rank, function):
        self.has_begun, self.may_continue = threading.Event(), threading.Event()
        self._waits, self._function = rank == 0, function

    def __call__(self, *args):
        result = self._function(*args)
        self.has_begun.set()
        assert not self._waits or self.may_continue.wait(200)
        return result


def values_after(store):
    """Return the values of all parameters, which all ranks update, and close the store."""
    store.end_transaction()
    store.flush()
    store.fabric.barrier("all updates")
    values = [store.parameters.read_param((stage, param)) for stage in range(2) for param in range(2)]
    store.fabric.barrier("all to have read")
    store.close()
    return torch.cat(values).unique().tolist()


def test_an_update_of_an_earlier_step_keeps_its_gradients():
    def program(fabric):
        store = make_store(fabric)
        step(store)
        store.begin_transaction()
        pause = store.ledger.apply = Pause(fabric.rank, store.ledger.apply)
        with ThreadPoolExecutor(1) as threads:
            applied = threads.submit(store.flush_stage, 0)
            assert pause.has_begun.wait(200)
            assert store.roll_back()
            pause.may_continue.set()
            applied.result(20)
        return values_after(store)

    assert ranks(SIZE, program) == [[-SIZE]] * SIZE


def test_an_update_that_has_not_begun_to_change_its_stage_is_undone():
    def program(fabric):
        store = make_store(fabric)
        store.begin_transaction()
        step(store)
        pause = store.access.before_update = Pause(fabric.rank, lambda stage, number: None)
        # One rank applies it: the other has undone it.
        with ThreadPoolExecutor(1) as threads:
            applied = threads.submit(store.flush_stage, 0) if fabric.rank == 0 else None
            assert applied is None or pause.has_begun.wait(200)
            threading.Timer(0.2, pause.may_continue.set).start()
            assert store.roll_back()
            if applied is not None:
                applied.result(20)
        return values_after(store)

    assert ranks(SIZE, program) == [[0]] * SIZE
