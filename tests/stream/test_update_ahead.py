"""Updates that run during a commit: each applies the whole commit, however late its thread starts."""

import time

from harness import FP32
from rank_training import plan_of, train, wire
from tests.rank_processes import run_ranks

from headwater.store.stages import StageAccess


def test_an_update_applies_a_whole_commit(monkeypatch):
    """An update left in the queue of one commit may reach a stage while the next commit is made."""
    plan, queue = plan_of(FP32, 1), StageAccess._queue

    def work(fabric):
        return train(fabric, plan, 1, read=wire)

    def queue_and_update(access, stage, *parts):
        queue(access, stage, *parts)
        if not access._fabric.computes:
            access.catch_up(stage)
            time.sleep(0.02)

    wanted = run_ranks(work, 2, 1, num_memx=1)
    monkeypatch.setattr(StageAccess, "_queue", queue_and_update)
    found = run_ranks(work, 2, 1, num_memx=1)
    for (told, weights), (other_told, other_weights) in zip(found, wanted, strict=True):
        assert told == other_told
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
