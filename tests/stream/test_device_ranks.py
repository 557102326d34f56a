"""Ranks with replicas of stages in device memory compute the bits of ranks that have no such stages."""

import contextlib
import dataclasses
import functools
import threading

import pytest
import torch
from harness import FP32, SEED, Job
from rank_training import Net, loss_of, plan_of, tokens, train
from test_device_out_of_memory import full_updates
from test_several_hosts import Choosing
from tests.device_double import DeviceDouble, DoubleEvent, Race, stand_in_for_cuda
from tests.rank_processes import run_ranks

from headwater.core.buffers import aligned_empty
from headwater.core.errors import DeviceFullError, StoreError
from headwater.core.precision import Precision
from headwater.store.device import Arrivals, DeviceMemory
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_hosts import SnapshotElsewhere
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.stream.engine import Engine

BF16 = Precision("bf16")


def on_double(fabric, work, seed=0):
    """Run `work` on a rank whose device is a double, and raise what the double has found."""
    device = DeviceDouble(10 * seed + fabric.rank)
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_cuda(device, patch)
        with device:
            found = work(fabric)
    device.end()
    return found


def masters_of(engine):
    """Return all masters as this rank reads them."""
    engine.store.flush()
    return list(engine.named_masters())


def mixed(plan, tier, gradients, on_device, folder):
    return dataclasses.replace(
        plan,
        device="cuda",
        in_place=False,
        slabs=3,
        tier=tier,
        gradient_tier=gradients,
        disk=folder,
        on_device=on_device,
    )


EVERY = tuple(range(8))


@pytest.mark.parametrize(
    ("precision", "micro_batches", "net", "tier", "gradients", "on_device"),
    [
        (FP32, 1, Net, "memory", "memory", (0, 3)),
        (BF16, 2, Choosing, "memory", "memory", EVERY),
        (BF16, 1, Net, "disk", "memory", (1, 2, 7)),
        (FP32, 2, Choosing, "disk", "disk", (0, 1, 5)),
    ],
)
def test_ranks_with_replicas_equal_ranks_without(
    precision, micro_batches, net, tier, gradients, on_device, tmp_path
):
    plan = plan_of(precision, micro_batches, net)
    work = functools.partial(train, micro_batches=micro_batches, net=net, read=masters_of)
    without, found = (
        run_ranks(lambda fabric, plan=each: on_double(fabric, functools.partial(work, plan=plan)), 2)
        for each in (mixed(plan, tier, gradients, where, tmp_path) for where in ((), on_device))
    )
    for (told, weights), (wanted, wanted_weights) in zip(found, without, strict=True):
        assert told == wanted
        assert weights.keys() == wanted_weights.keys()
        assert all((weights[name] == wanted_weights[name]).all() for name in weights)


def resumed(fabric, plan, folder):
    """Train two steps, write a checkpoint while a third one runs, and return masters of a run from it."""

    def part(step, index):
        return tokens(step, index).chunk(2)[fabric.rank]

    work, found = Job(Net, part, loss_of), []
    make = functools.partial(
        Engine, optimizer=work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric
    )
    with make(work.model(), plan) as engine:
        for step in range(2):
            engine.train_step(work.batches(step), work.update(step))
        engine.store.flush()
        engine.store.scalars.share()
        leads, store = fabric.rank == 0, engine.store
        snapshot = Snapshot(store, folder, 2) if leads else SnapshotElsewhere(store)
        saving = threading.Thread(target=snapshot.run)
        saving.start()
        engine.train_step(work.batches(2), work.update(2))
        saving.join()
        fabric.barrier("the checkpoint")
        found.append(dict(masters_of(engine)))
    with make(work.model(), plan) as engine:
        SavedCheckpoint(folder).restore(engine.store)
        engine.train_step(work.batches(2), work.update(2))
        found.append(dict(masters_of(engine)))
        fabric.barrier("the end")
    return [{name: value.numpy() for name, value in each.items()} for each in found]


def test_replicas_resume_from_a_checkpoint(tmp_path):
    plan = mixed(plan_of(FP32, 1), "memory", "memory", (0, 3, 4), tmp_path)
    work = functools.partial(resumed, plan=plan, folder=tmp_path / "checkpoint")
    found = run_ranks(lambda fabric: on_double(fabric, work), 2)
    first = found[0][0]
    for each in (found[0][1], *found[1]):
        assert all((each[name] == first[name]).all() for name in first)


@pytest.mark.parametrize("waits", [True, False])
def test_ranks_change_a_sum_only_after_it_was_copied(waits, monkeypatch):
    if not waits:
        monkeypatch.setattr(DoubleEvent, "synchronize", lambda event: None)
    device, total = DeviceDouble(), aligned_empty(4096)
    unlock = device.page_lock([total])
    arrivals = Arrivals(DeviceMemory(device.allocate_slab, device.compute, device.new_stream), 4096)
    with device, contextlib.ExitStack() as refused:
        with arrivals.received([total.view(torch.float32), None]) as copies:
            assert copies[1] is None
        if not waits:
            refused.enter_context(pytest.raises(Race))
        total.zero_()  # the next step begins
    assert bool(device.races) != waits
    device.races.clear()
    monkeypatch.undo()
    device.compute.record().synchronize()
    unlock()
    device.end()


@pytest.mark.parametrize(("given", "found"), [("seed", "initial weights"), ("product", "equal devices")])
def test_replicas_that_would_differ_are_refused(given, found, tmp_path):
    plan = mixed(plan_of(FP32, 1), "memory", "memory", (0, 3), tmp_path)

    def work(fabric):
        torch.manual_seed(fabric.rank if given == "seed" else 0)
        model, job = Net(), Job(Net, tokens, loss_of)
        if given == "product":
            DeviceDouble.product = f"GPU {fabric.rank}"
        with pytest.raises(StoreError, match=found) as refused:
            Engine(model, plan, job.optimizer, fabric=fabric)
        return refused.value.remedy

    remedies = run_ranks(lambda fabric: on_double(fabric, work), 2)
    assert all("stages_on_device: 0" in remedy for remedy in remedies)


def test_memory_that_is_missing_on_one_rank_stops_no_update_halfway(tmp_path):
    """The rank without memory raises; its update continues with the sums that its ranks still have."""
    plan = mixed(plan_of(FP32, 1), "memory", "memory", (0, 3), tmp_path)

    def work(fabric, full):
        def part(step, index):
            return tokens(step, index).chunk(2)[fabric.rank]

        job = Job(Net, part, loss_of)
        with Engine(
            job.model(), plan, job.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric
        ) as engine:
            engine.train_step(job.batches(0), job.update(0))
            if full and fabric.rank == 1:
                with full_updates(pytest.MonkeyPatch(), 2), pytest.raises(DeviceFullError):
                    engine.store.flush_stage(3)
            told = engine.train_step(job.batches(1), job.update(1))
            weights = {name: value.numpy() for name, value in masters_of(engine)}
            fabric.barrier("the end")
        return told.loss, weights

    runs = [
        run_ranks(lambda fabric, full=full: on_double(fabric, functools.partial(work, full=full)), 2)
        for full in (False, True)
    ]
    for (loss, weights), (wanted_loss, wanted) in zip(runs[1], runs[0], strict=True):
        assert loss == wanted_loss
        assert all((weights[name] == wanted[name]).all() for name in wanted)
