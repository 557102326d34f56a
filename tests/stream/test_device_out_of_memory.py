"""A GPU without memory in the middle of an update: the step is whole, and the update continues."""

import contextlib
import dataclasses

import pytest
import torch
from harness import History, Setting, assert_equal, collect, make_plan, regression, train_plain
from test_device_double import double_of, on_double
from test_device_tier import MIXED, Bag, steps_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.core.errors import DeviceFullError, StreamError
from headwater.optim.spec import OptimizerSpec
from headwater.store.layout import StageLayout
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.updater import Updater

ON_DEVICE = Setting(on_device=(0, 1, 2))


def three():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))


@pytest.fixture
def double(monkeypatch):
    device = double_of(1, monkeypatch)
    yield device
    device.end(unlocked=False)


@pytest.fixture
def small_pieces(monkeypatch):
    """Divide stages into several pieces, so that an update may end between two of them."""
    make = StageLayout.__init__

    def made(self, *args, **options):
        make(self, *args, **{**options, "piece_elements": 128})

    monkeypatch.setattr(StageLayout, "__init__", made)


class Full(TorchDispatchMode):
    """A context in which one operator that allocates memory fails, the one with number `at` from 1 on."""

    def __init__(self, at):
        super().__init__()
        self.at, self.allocations = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if allocates(func, kwargs or {}):
            self.allocations += 1
            if self.allocations == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return func(*args, **(kwargs or {}))


def allocates(func, kwargs):
    """True if an operator returns new memory. `out` and targets of in-place operators have memory already."""
    if func is torch.ops.aten._local_scalar_dense.default or kwargs.get("out") is not None:
        return False
    returns = func._schema.returns
    return any(each.alias_info is None and "Tensor" in str(each.type) for each in returns)


@contextlib.contextmanager
def full_updates(monkeypatch, at):
    """Make one allocation of the updates in this context fail."""
    apply, full = Updater.apply, Full(at)

    def applied(self, *args):
        with full:
            return apply(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "apply", applied)
        yield full


def run_with_a_full_device(job, setting, folder, device, monkeypatch, at):
    """Train three steps. The allocation `at` of the updates fails; each step that fails is repeated once.

    Returns the history, and the error or None.
    """
    history, errors = History(), []
    with device, on_double(job, setting, folder) as engine:
        steps_of(engine, job, history, range(1))
        with full_updates(monkeypatch, at):
            for step in range(1, 3):
                try:
                    steps_of(engine, job, history, [step])
                except DeviceFullError as error:
                    errors.append(error)
                    steps_of(engine, job, history, [step])
            with contextlib.suppress(DeviceFullError):
                engine.store.flush()
        collect(engine, history)
    return history, errors


def optimized(name, **options):
    return regression(three, 8, 16, optimizer=OptimizerSpec(name, {"lr": 0.01, **options}))


JOBS = {
    "AdamW": lambda: regression(three, 8, 16),
    "AdamW without clipping": lambda: regression(three, 8, 16, max_norm=None),
    "AdamW, two micro-batches": lambda: regression(three, 8, 16, micro_batches=2),
    "SGD": lambda: optimized("SGD", momentum=0.9),
    "SGD with sparse gradients": lambda: regression(
        Bag, 3, 5, optimizer=OptimizerSpec("SGD", {"lr": 0.1}), max_norm=None
    ),
    "RMSprop": lambda: optimized("RMSprop", centered=True),
    "Rprop": lambda: optimized("Rprop"),
    "Adafactor": lambda: optimized("Adafactor"),
}
EVERY_ALLOCATION = {"AdamW", "SGD with sparse gradients"}
STRIDE = 11  # others: each allocation of a kernel fails in some piece


@pytest.mark.parametrize("name", sorted(JOBS))
def test_memory_that_is_missing_at_any_allocation_of_an_update_leaves_the_step_whole(
    name, double, small_pieces, monkeypatch, tmp_path
):
    job, at, errors = JOBS[name](), 1, ["first"]
    setting = Setting(on_device=(0, 1)) if "sparse" in name else ON_DEVICE
    if "sparse" in name:  # the norm of plain PyTorch refuses sparse gradients
        wanted, _ = run_with_a_full_device(job, setting, tmp_path, double, monkeypatch, 1 << 30)
    else:
        wanted = train_plain(job, steps=3)
    while errors:
        history, errors = run_with_a_full_device(job, setting, tmp_path, double, monkeypatch, at)
        assert_equal(history, wanted)
        at += 1 if name in EVERY_ALLOCATION else STRIDE
    assert at > 4


@pytest.mark.parametrize("bf16_state", [False, True])
def test_an_update_in_mixed_precision_continues_after_memory_was_missing(
    bf16_state, double, small_pieces, monkeypatch, tmp_path
):
    job, at, errors = regression(three, 8, 16), 1, ["first"]
    setting = Setting(on_device=(0, 1, 2), precision=MIXED)
    if bf16_state:
        monkeypatch.setattr("test_device_double.make_plan", lambda *args: with_bf16_state(make_plan(*args)))
    wanted, _ = run_with_a_full_device(job, setting, tmp_path, double, monkeypatch, 1 << 30)
    while errors:
        history, errors = run_with_a_full_device(job, setting, tmp_path, double, monkeypatch, at)
        assert_equal(history, wanted)
        at += 3
    assert at > 8


def with_bf16_state(plan):
    return dataclasses.replace(plan, trace=plan.trace.storing("bf16"))


def test_the_error_says_which_step_is_committed_and_where_memory_was_missing(double, monkeypatch, tmp_path):
    job = regression(three, 8, 16)
    with double, on_double(job, ON_DEVICE, tmp_path) as engine:
        steps_of(engine, job, History(), range(1))
        with full_updates(monkeypatch, 2), pytest.raises(DeviceFullError) as caught:
            engine.train_step(job.batches(1), job.update(1))
        error = caught.value
        assert error.what == (
            "the GPU has no memory left for the update of step 0: "
            "CUDA out of memory. Tried to allocate 2.00 MiB"
        )
        assert error.where == "stage '0'"
        assert "step 0 is committed, and the next use of the stage completes its update" in error.remedy
        assert "a step that was running was not applied" in error.remedy
        assert engine.store.ledger.num_commits == 1
        assert engine.store.scalars.by_stage[0][0] is None, "half an update is not visible"


def test_a_checkpoint_after_an_update_without_memory_has_the_whole_step(
    double, small_pieces, monkeypatch, tmp_path
):
    job, path, history = regression(three, 8, 16), tmp_path / "checkpoint", History()
    with double:
        with on_double(job, ON_DEVICE, tmp_path) as engine:
            steps_of(engine, job, history, range(1))
            with full_updates(monkeypatch, 12):
                with pytest.raises(DeviceFullError):
                    Snapshot(engine.store, path, 1)
                assert not path.exists()
                Snapshot(engine.store, path, 1).run()
        with on_double(job, ON_DEVICE, tmp_path) as resumed:
            SavedCheckpoint(path).restore(resumed.store)
            steps_of(resumed, job, history, range(1, 3))
            collect(resumed, history)
    assert_equal(history, train_plain(job, steps=3))


def test_weights_that_are_replaced_after_an_update_without_memory_start_again(
    double, small_pieces, monkeypatch, tmp_path
):
    job, path, history = regression(three, 8, 16), tmp_path / "checkpoint", History()
    with double, on_double(job, ON_DEVICE, tmp_path) as engine:
        Snapshot(engine.store, path, 0).run()
        steps_of(engine, job, History(), range(1))
        with full_updates(monkeypatch, 12), pytest.raises(DeviceFullError):
            engine.store.flush()
        SavedCheckpoint(path).restore(engine.store)
        steps_of(engine, job, history, range(2))
        collect(engine, history)
    assert_equal(history, train_plain(job, steps=2))


def test_memory_that_is_missing_at_any_allocation_of_a_step_leaves_no_trace(double, tmp_path):
    job, at, failed = regression(three, 8, 16), 0, True
    wanted = train_plain(job, steps=2)
    while failed:
        at, history = at + 1, History()
        with double, on_double(job, ON_DEVICE, tmp_path) as engine:
            steps_of(engine, job, history, range(1))
            engine.store.flush()
            commits = engine.store.ledger.num_commits
            full, batches, update = Full(at), job.batches(1), job.update(1)
            try:
                with full:
                    report = engine.train_step(batches, update)
                history.losses.append(report.loss)
                history.norms.append(report.gradient_norm)
            except StreamError as error:
                assert "the step was not applied" in error.remedy
                assert engine.store.ledger.num_commits == commits
                steps_of(engine, job, history, [1])
            failed = full.allocations >= at
            collect(engine, history)
        assert_equal(history, wanted)
    assert at > 20


def test_a_commit_of_a_users_loop_without_memory_leaves_no_trace(double, tmp_path):
    job, at, failed, found = regression(three, 8, 16), 0, True, []
    while failed:
        at += 1
        with double, on_double(job, dataclasses.replace(ON_DEVICE, user_loop=True), tmp_path) as engine:
            engine.model(job.make_batch(0, 0)).sum().backward()
            gradients = [param.grad for param in engine.model.parameters()]  # the loop keeps them
            full = Full(at)
            try:
                with full:
                    engine.store.commit(job.update(0))
            except torch.OutOfMemoryError:
                assert engine.store.ledger.num_commits == 0
                assert len(engine.store.gradients.status.present) == len(gradients)
                engine.store.commit(job.update(0))
            failed = full.allocations >= at
            found.append(collect(engine, History()))
        assert_equal(found[-1], found[0])
    assert at > 6
