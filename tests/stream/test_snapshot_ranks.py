"""With slow checkpoints of several ranks training continues, and each checkpoint is of its step."""

import dataclasses
import faulthandler
import threading
import time

import pytest
import torch
from harness import FP32, SEED, Job
from rank_training import Net, loss_of, plan_of, tokens
from tests.rank_processes import run_ranks

from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_hosts import SnapshotElsewhere
from headwater.stream.engine import Engine
from headwater.trainer.pretrained import checkpoint_weights


def train(fabric, plan, folder, slow, steps, max_norm=None):
    """Take a snapshot of the first step while further steps run; the rank `slow` begins its snapshot late."""

    def part(step, index):
        return tokens(step, index)[fabric.rank : fabric.rank + 1] if fabric.computes else None

    faulthandler.dump_traceback_later(200, exit=True)  # a deadlock would block the test
    work = Job(Net, part, loss_of, max_norm=max_norm)
    with Engine(
        work.model(), plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric
    ) as engine:
        engine.train_step(work.batches(0), work.update(0))
        engine.store.flush()
        engine.store.scalars.share()
        if fabric.computes:
            engine.evaluate(tokens(99, 0))  # fills the slabs, so that the next step need not fetch
        leads, store = fabric.rank == 0, engine.store
        snapshot = Snapshot(store, folder, 1) if leads else SnapshotElsewhere(store)

        def save():
            time.sleep(1.0 if fabric.rank == slow else 0.0)
            snapshot.run()

        saving = threading.Thread(target=save)
        saving.start()
        for step in range(1, steps):
            engine.train_step(work.batches(step), work.update(step))
            if fabric.computes and fabric.num_hosts == 1:  # as moving averages do
                for stage in store.stages:
                    store.parameters.read_param((stage.index, 0))
        saving.join()
        engine.store.flush()
        fabric.barrier("the end")


@pytest.mark.parametrize(
    ("ranks", "hosts", "num_memx", "late", "tier"),
    [(2, 2, 0, 1, "disk"), (2, 1, 1, 0, "memory"), (4, 2, 1, 2, "disk")],
)
def test_a_slow_checkpoint_is_of_its_step_and_no_rank_blocks_forever(
    ranks, hosts, num_memx, late, tier, tmp_path
):
    plan = plan_of(FP32, 1)
    if tier == "disk":
        plan = dataclasses.replace(plan, tier="disk", in_place=False, disk=tmp_path / "disk", slabs=99)
    for name, slow, steps in (("plain", None, 1), ("slow", late, 4)):
        folder = tmp_path / name / "checkpoint_1"
        folder.parent.mkdir()
        run_ranks(lambda fabric: train(fabric, plan, folder, slow, steps, 0.5), ranks, hosts, num_memx)  # noqa: B023
    plain, slow = (dict(checkpoint_weights(tmp_path / name / "checkpoint_1")) for name in ("plain", "slow"))
    for name, value in plain.items():
        assert torch.equal(slow[name], value), name
