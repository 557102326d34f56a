"""Updates that run beside a commit: each is of the whole commit, however late their thread comes to it."""

import time

from harness import FP32
from rank_training import plan_of, train, wire
from tests.rank_processes import run_ranks

from headwater.store.store import WeightStore


def test_an_update_does_not_begin_with_half_of_a_commit(monkeypatch):
    """What is left in the queue of updates of one commit may come to a stage while the next is made."""
    plan, add_pending = plan_of(FP32, 1), WeightStore._add_pending

    def work(fabric):
        return train(fabric, plan, 1, read=wire)

    def add_and_update(store, stage, *parts):
        add_pending(store, stage, *parts)
        if not store.fabric.computes:
            store._update_ahead(stage)
            time.sleep(0.02)

    wanted = run_ranks(work, 2, 1, num_memx=1)
    monkeypatch.setattr(WeightStore, "_add_pending", add_and_update)
    found = run_ranks(work, 2, 1, num_memx=1)
    for (told, weights), (other_told, other_weights) in zip(found, wanted, strict=True):
        assert told == other_told
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
