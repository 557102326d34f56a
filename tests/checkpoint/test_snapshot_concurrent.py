"""A snapshot taken during training equals one taken while training is paused."""

import itertools
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_runs import MOMENTUM, STAGES, add_gradients, assert_same, fetch_stage, make_store, train
from torch import nn

from headwater.core.errors import DiskFullError
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Plan
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager

NUM_STAGES = len(STAGES)


def trained(folder: Path | None, steps: int, **options):
    store = make_store(folder, **options)
    for step in range(steps):
        train(store, step)
    return store


def assert_is_step(path: Path, steps: int, **options) -> None:
    """Assert that the checkpoint equals a store that stopped after `steps` steps."""
    loaded, reference = make_store(**options), trained(None, steps, **options)
    SavedCheckpoint(path).restore(loaded)
    assert_same(loaded, reference)


@pytest.mark.parametrize("saved_before", range(NUM_STAGES + 1))
@pytest.mark.parametrize("tier", ["memory", "disk", "device"])
def test_a_snapshot_is_of_its_step_when_training_overtakes_it(tmp_path, tier, saved_before):
    """Some stages are saved, then training takes two steps, then the other stages are saved."""
    options = {"wire": torch.bfloat16, "optimizer": MOMENTUM}
    folder = tmp_path / "tier" if tier == "disk" else None
    store = trained(folder, 2, on_device=tier == "device", **options)
    snapshot = Snapshot(store, tmp_path / "c", 2)
    for stage in range(saved_before):
        snapshot.save_stage(stage)
    train(store, 2)
    train(store, 3)
    assert_is_step(snapshot.run(), 2, **options)
    train(store, 4)
    assert_same(store, trained(None, 5, **options))
    store.close()


@pytest.mark.parametrize("used", [(0, 1, 2, 3), (1, 3), (2,), ()])
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3), (2,), ()])
def test_a_snapshot_includes_only_updates_up_to_its_step(tmp_path, used, order):
    """The next step updates some stages after the snapshot; the pending update of the others is older."""
    store, reference = trained(None, 2), trained(None, 2)
    snapshot = Snapshot(store, tmp_path / "c", 2)
    for run in (store, reference):
        train(run, 2, used=used)
    for stage in order:
        fetch_stage(store, stage)
    assert_is_step(snapshot.run(), 2)
    assert_same(store, reference)


@pytest.mark.parametrize("tier", ["memory", "disk", "device"])
@pytest.mark.parametrize("first", ["the snapshot", "an update"])
def test_a_snapshot_includes_the_older_of_two_commits_of_a_stage(tmp_path, tier, first):
    """Two optimizers share the stages: one commits before the snapshot begins, the other afterwards."""
    folder = tmp_path / "tier" if tier == "disk" else None
    store, reference = make_store(folder, on_device=tier == "device"), make_store()
    for each in (store, reference):
        add_gradients(each, 0, each.stages)
        commit_some(each, 0)
    snapshot = Snapshot(store, tmp_path / "c", 1)
    commit_some(store, 1)
    if first == "an update":
        fetch_stage(store, 0)
    loaded = make_store()
    SavedCheckpoint(snapshot.run()).restore(loaded)
    assert_same(loaded, reference)
    commit_some(reference, 1)
    assert_same(store, reference)
    store.close()


def commit_some(store, param: int) -> None:
    """Commit the gradient of one parameter of each stage, as one of two optimizers."""
    keys = [key for key in store.gradients.status.present if key[1] == param]
    update = Update(1, {"lr": 0.1})
    store.commit(update, dict.fromkeys(keys, update))


def test_a_weight_replaced_during_a_snapshot_is_saved_with_its_old_values(tmp_path):
    """A mask or a moving average replaces weights between two updates in this way."""
    store = trained(None, 2)
    snapshot = Snapshot(store, tmp_path / "c", 2)
    store.parameters.write_param((1, 0), torch.zeros(store.stages[1].params[0].shape))
    assert_is_step(snapshot.run(), 2)
    assert not store.parameters.read_param((1, 0)).any()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_saves_at_every_step_run_in_the_background(tmp_path, tier):
    """Each step is saved in the background while the next steps run."""
    store = make_store(tmp_path / "tier" if tier == "disk" else None, wire=torch.bfloat16)
    manager = CheckpointManager(tmp_path)
    paths = []
    for step in range(4):
        train(store, step)
        paths.append(manager.save(store, step + 1, {}))
    manager.wait()
    for steps, path in enumerate(paths, start=1):
        assert_is_step(path, steps, wire=torch.bfloat16)
    store.close()


@pytest.mark.parametrize("pieces_read", [0, 1])
def test_update_waits_for_the_stage_being_saved(tmp_path, monkeypatch, pieces_read):
    """A stage that one thread is saving is not saved or changed by another."""
    store = trained(None, 1)
    train(store, 1)  # an update of the snapshot's own step is pending
    snapshot = Snapshot(store, tmp_path / "c", 2)
    begun, go_on = threading.Event(), threading.Event()
    read = store.parameters.read

    def slow_read(stage, **options):
        pieces = read(stage, **options)
        if stage == 0:
            yield from itertools.islice(pieces, pieces_read)
            begun.set()
            assert go_on.wait(200)
        yield from pieces

    monkeypatch.setattr(store.parameters, "read", slow_read)
    writer = threading.Thread(target=snapshot.run)
    writer.start()
    assert begun.wait(200)
    train_thread = threading.Thread(target=train_twice, args=(store,))  # begins by fetching stage 0
    train_thread.start()
    train_thread.join(0.1)
    assert train_thread.is_alive()
    go_on.set()
    train_thread.join()
    writer.join()
    assert_is_step(tmp_path / "c", 2)


def test_a_failure_on_the_training_thread_stops_only_the_snapshot(tmp_path, monkeypatch):
    store = trained(None, 1)
    snapshot = Snapshot(store, tmp_path / "c", 1)
    (tmp_path / "c.partial" / "weights_0001.safetensors").unlink()
    train(store, 1)
    train(store, 2)  # the hook fails here, in the first update after the snapshot
    with pytest.raises(Exception, match=r"weights_0001.safetensors: No such file"):
        snapshot.run()
    assert list(tmp_path.iterdir()) == []
    train(store, 3)
    assert_same(store, trained(None, 4))


def train_twice(store):
    train(store, 2)
    train(store, 3)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def engine(slabs: int) -> Engine:
    torch.manual_seed(0)
    model = Chain()
    precision = Precision("fp32")
    trace = trace_step(model, batch(0), precision, loss_function=call)
    plan = Plan(
        trace,
        precision,
        "cpu",
        "memory",
        False,
        slabs,
        (Activations.KEEP,) * len(trace.stages),
        4,
        1,
        "memory",
    )
    return Engine(model, plan, OptimizerSpec("AdamW", {"lr": 0.1}), loss_function=call)


def call(model, x):
    return model(x)


def batch(step: int) -> torch.Tensor:
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("slabs", [2, 99])
def test_weights_on_the_device_follow_updates_by_the_snapshot(tmp_path, slabs):
    """The snapshot applies updates before the executor needs them, so no slab may keep older weights."""

    def losses(folder: Path | None) -> list[float]:
        found = []
        with engine(slabs) as running:
            for step in range(5):
                found.append(running.train_step([batch(step)], Update(step, {"lr": 0.1})).loss)
                if folder is not None:
                    Snapshot(running.store, folder / f"{step}", step).run()
        return found

    assert losses(tmp_path) == losses(None)


def test_a_full_disk_is_raised_by_the_next_call(tmp_path, monkeypatch):
    store = trained(None, 1)
    manager = CheckpointManager(tmp_path)
    first = manager.save(store, 1, {})
    manager.wait()
    train(store, 1)
    monkeypatch.setattr(Snapshot, "save_stage", _no_space)
    manager.save(store, 2, {})
    with pytest.raises(DiskFullError):
        manager.save(store, 3, {})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert manager.latest() == first
    manager.save(store, 3, {})
    manager.wait()
    assert_is_step(tmp_path / "checkpoint_3", 2)


def _no_space(snapshot, stage):
    raise DiskFullError("no space left", where=str(snapshot.folder))
