"""Updates during backward: a step commits, or it is lost, and every later use of the store says so."""

import copy
import dataclasses
import threading
import weakref

import pytest
import torch
from harness import (
    History,
    Setting,
    assert_equal,
    check,
    collect,
    make_engine,
    make_plan,
    regression,
    train_streamed,
)
from test_device_double import double_of, on_double
from test_failed_steps import make_job, raised
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headwater
from headwater.core.errors import ConfigError, NonFiniteError, StoreError, StreamError
from headwater.fabric.fabric import ALONE
from headwater.plan.footprint import Footprint
from headwater.store.gradients.additions import AdditionThread
from headwater.store.gradients.local import LocalGradients
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.store import WeightStore
from headwater.stream.engine import Engine

SETTINGS = [
    Setting(in_place=True, updates="in_backward"),
    Setting("memory", 2, updates="in_backward"),
    Setting("memory", 99, "recompute", updates="in_backward"),
    Setting("disk", 2, "recompute", "disk", updates="in_backward"),
]


def job_of(**options):
    return make_job(max_norm=None, **options)


def fail(engine, job, at, kind, error):
    """Run a step in which stage number `at` fails. Return the error."""
    engine.model[at].fault.kind = kind
    seen = raised(error, lambda: engine.train_step(job.batches(17), job.update(17)))
    engine.model[at].fault.kind = ""
    return seen


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("kind", "error"), [("nan in backward", NonFiniteError), ("raise in backward", ZeroDivisionError)]
)
def test_a_failure_after_the_first_update_loses_the_step(kind, error, setting, tmp_path):
    job = job_of()
    with make_engine(job, setting, tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        seen = fail(engine, job, 0, kind, error)
        told = seen.remedy if isinstance(seen, NonFiniteError) else " ".join(seen.__notes__)
        assert "stages have applied step 17" in told
        assert "resume from the last checkpoint" in told
        assert "was not applied" not in told
        assert ("lower the learning rate" in told) == isinstance(seen, NonFiniteError)
        uses = {
            "a step": lambda: engine.train_step(job.batches(1), job.update(1)),
            "an evaluation": lambda: engine.evaluate(job.make_batch(0, 0)),
            "a weight": lambda: engine.master("0.linear.weight"),
            "a checkpoint": lambda: Snapshot(engine.store, tmp_path / "checkpoint", 1),
        }
        for name, use in uses.items():
            error = raised(StoreError, use)
            assert "step 17 has failed after" in error.what, name
            assert error.remedy == "resume from the last checkpoint"
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nan in backward", NonFiniteError),
        ("raise in backward", ZeroDivisionError),
        ("inf in forward", NonFiniteError),
    ],
)
def test_a_failure_before_the_first_update_leaves_no_trace(kind, error, setting, tmp_path):
    """The last stage is the first in backward."""
    job, history = job_of(), History()
    with make_engine(job, setting, tmp_path) as engine:
        for step in range(3):
            if step == 1:
                seen = fail(engine, job, 4, kind, error)
                assert not isinstance(seen, NonFiniteError) or "was not applied" in seen.remedy
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    assert_equal(history, train_streamed(job, setting, tmp_path, steps=3))


def test_an_update_that_fails_before_it_changes_its_stage_loses_no_step(tmp_path, monkeypatch):
    """The next use of the stage makes the update, so its first failure means nothing for the next step."""
    job, setting, history, failed = job_of(), SETTINGS[3], History(), threading.Event()
    with make_engine(job, setting, tmp_path) as engine:
        update, commit = engine.store.access._update, engine.store._commit

        def failing_once(stage, buffer=None):
            if threading.current_thread().name.startswith("headwater-update") and not failed.is_set():
                failed.set()
                raise MemoryError("no memory for a wire image")
            return update(stage, buffer)

        def committing(*args):
            # After the backward, which waits for the updates that it has begun.
            monkeypatch.setattr(engine.store.access, "_update", failing_once)
            return commit(*args)

        monkeypatch.setattr(engine.store, "_commit", committing)
        for step in range(3):
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
            assert failed.wait(200)
        collect(engine, history)
    assert_equal(history, train_streamed(job, setting, tmp_path, steps=3))


def test_an_interrupt_in_backward_loses_the_step(tmp_path):
    job = job_of()
    with make_engine(job, SETTINGS[1], tmp_path) as engine:

        def interrupt(param):
            raise KeyboardInterrupt

        engine.model[0].linear.weight.register_post_accumulate_grad_hook(interrupt)
        seen = raised(KeyboardInterrupt, lambda: engine.train_step(job.batches(0), job.update(0)))
        assert "resume from the last checkpoint" in seen.__notes__[0]
        raised(StoreError, lambda: engine.master("4.linear.weight"))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_checkpoint_that_had_begun_is_whole_although_a_step_is_lost(setting, tmp_path):
    job = job_of()
    expected = train_streamed(job, setting, tmp_path, steps=2)
    with make_engine(job, setting, tmp_path) as engine:
        for step in range(2):
            engine.train_step(job.batches(step), job.update(step))
        snapshot = Snapshot(engine.store, tmp_path / "checkpoint", 2)
        fail(engine, job, 0, "nan in backward", NonFiniteError)
        snapshot.run()
    with make_engine(job, setting, tmp_path) as resumed:
        SavedCheckpoint(tmp_path / "checkpoint").restore(resumed.store)
        weights = dict(resumed.named_masters())
    assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_checkpoint_has_no_update_of_the_next_step(setting, tmp_path):
    """A stage is saved before the next step's update changes it, on the thread that updates."""
    job = job_of()
    expected = train_streamed(job, setting, tmp_path, steps=2)
    with make_engine(job, setting, tmp_path) as engine:
        for step in range(2):
            engine.train_step(job.batches(step), job.update(step))
        snapshot = Snapshot(engine.store, tmp_path / "checkpoint", 2)
        engine.train_step(job.batches(2), job.update(2))
        snapshot.run()
        SavedCheckpoint(tmp_path / "checkpoint").restore(engine.store)
        weights = dict(engine.named_masters())
    assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_checkpoint_cannot_begin_between_the_first_update_and_the_commit(setting, tmp_path):
    """It would have some stages after the step, and others before it."""
    job, seen = job_of(), []

    def begin(update):
        seen.append(raised(StoreError, lambda: Snapshot(engine.store, tmp_path / "checkpoint", 0)))

    with make_engine(job, setting, tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0), begin)
        assert "4 of 5 stages have applied step 0, which is not committed" in seen[0].what
        Snapshot(engine.store, tmp_path / "checkpoint", 1).run()


def test_gradients_of_a_failed_step_that_come_late_are_not_used_in_the_next(tmp_path, monkeypatch):
    """The first step fails while its gradients are on their way from the device."""
    job, history, may_arrive = job_of(), History(), threading.Event()
    expected = train_streamed(job, SETTINGS[1], tmp_path, steps=2)
    add, begin = WeightStore.add_gradient, WeightStore.begin_step

    def late(store, *args, **options):
        may_arrive.wait()
        add(store, *args, **options)

    def begin_late(store):
        may_arrive.set()
        begin(store)

    device = double_of(0, monkeypatch)
    with device, on_double(job, SETTINGS[1], tmp_path) as engine:
        monkeypatch.setattr(WeightStore, "add_gradient", late)
        # Otherwise the backward would wait for the gradients of its second stage.
        monkeypatch.setattr(AdditionThread, "drain", lambda self: None)
        fail(engine, job, 2, "raise in backward", ZeroDivisionError)
        monkeypatch.setattr(WeightStore, "begin_step", begin_late)
        for step in range(2):
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    device.end()
    assert_equal(history, expected)


class Detached(nn.Module):
    """A layer whose backward needs its weight once more, after the weight has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = F.linear(x, self.linear.weight.detach())
        return torch.tanh(self.linear(x))


class Unused(nn.Module):
    """A layer with a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Tied(nn.Module):
    """Two layers with one weight, around another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x))))


class Checkpointed(nn.Module):
    """Two layers, each used in two checkpoints, which run their backwards inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()
        for layer in (*self.layers, *self.layers):
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("block", [Detached, Unused, Tied, Checkpointed])
def test_weights_that_are_used_in_unusual_ways(block, setting, tmp_path):
    check(regression(lambda: nn.Sequential(block(), block()), 8, 16, max_norm=None), setting, tmp_path)


class Auxiliary(nn.Module):
    """Runs the backward of a second loss in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        if torch.is_grad_enabled():
            self.layers(x).square().mean().backward()
        return self.layers(x)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2]], ids=str)
def test_a_forward_that_runs_a_backward(setting, micro_batches, tmp_path):
    check(regression(Auxiliary, 8, 16, max_norm=None, micro_batches=micro_batches), setting, tmp_path)


def halve(param):
    param.grad.mul_(0.5)


def replace(param):
    param.grad = param.grad + 1


def drop(param):
    param.grad = None


def hooked(change):
    """Return a model with hooks that change gradients as soon as they are there."""
    model = deep(16, 4)
    for param in (model[1].weight, model[3].bias, *model[2].parameters()):
        param.register_post_accumulate_grad_hook(change)
    return model


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("change", [halve, replace, drop])
def test_a_hook_that_changes_gradients(change, setting, micro_batches, tmp_path):
    job = regression(lambda: hooked(change), 8, 16, max_norm=None, micro_batches=micro_batches)
    check(job, setting, tmp_path)


class Layer(nn.Linear):
    """A linear layer that can compute with its weight without training it."""

    def forward(self, x, *, detached=False):
        return F.linear(x, self.weight.detach()) if detached else super().forward(x)


class LateUse(nn.Module):
    """Calls its layers in another way than in the dry run, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Layer(16, 16) for _ in range(4)), ""

    def forward(self, x):
        layers = self.layers[::-1] if self.kind == "reversed" else self.layers
        for index, layer in enumerate(layers):
            if self.kind == "once more" and index == 1:
                x = self.layers[3](x, detached=True)
            x = layer(x)
        return x


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_backward_in_another_order_than_in_the_dry_run(setting, tmp_path):
    def turn(model, step):
        model.kind = "" if step else "reversed"

    job = regression(LateUse, 8, 16, max_norm=None, after_plain_step=turn,
                     after_streamed_step=lambda engine, step: turn(engine.model, step))  # fmt: skip
    check(job, setting, tmp_path)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_backward_that_needs_an_updated_weight_raises(setting, tmp_path):
    """The dry run did not see the use, so the order of the backward was not known."""
    job = regression(LateUse, 8, 16, max_norm=None)
    with make_engine(job, setting, tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        engine.model.kind = "once more"
        with pytest.raises((StreamError, RuntimeError), match=r"after the stage's update|in place|inplace"):
            engine.train_step(job.batches(1), job.update(1))
        with pytest.raises(StoreError, match="step 1 has failed after"):
            engine.master("layers.0.weight")


def test_steps_that_need_all_gradients_first_are_refused(tmp_path):
    job = job_of()
    with make_engine(job, SETTINGS[0], tmp_path) as engine:
        changes = {"max_norm": 1.0, "loss_scale": 8.0, "skip_non_finite": True}
        for name, value in changes.items():
            update = dataclasses.replace(job.update(0), **{name: value})
            with pytest.raises(ConfigError, match=f"without {name}"):
                engine.train_step(job.batches(0), update)


@pytest.mark.parametrize(
    ("fabric", "user_loop", "text"),
    [
        (ALONE, True, "your own loop"),
        (copy.copy(ALONE), False, "2 hosts"),
        (copy.copy(ALONE), False, "1 store ranks"),
    ],
)
def test_engines_that_cannot_update_in_backward(fabric, user_loop, text, tmp_path, monkeypatch):
    job = job_of()
    if text == "2 hosts":
        monkeypatch.setattr(type(fabric), "hosts", (0, 1))
    if text == "1 store ranks":
        monkeypatch.setattr(type(fabric), "size", 2)
    setting = dataclasses.replace(SETTINGS[0], user_loop=user_loop)
    with pytest.raises(ConfigError, match=text):
        Engine(job.model(), make_plan(job, job.model(), setting, tmp_path), job.optimizer, fabric=fabric)


class Alive:
    """Counts the bytes of gradients that the store has received and that are still in memory."""

    def __init__(self, monkeypatch):
        self.most, self._alive = 0, weakref.WeakSet()
        add = LocalGradients.add

        def counted(gradients, key, gradient, **options):
            self._alive.add(gradient.untyped_storage())
            self.most = max(self.most, sum(storage.nbytes() for storage in self._alive))
            return add(gradients, key, gradient, **options)

        monkeypatch.setattr(LocalGradients, "add", counted)


def deep(width=32, depth=12):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


class Divided(nn.Module):
    """A block whose matrices can be stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
def test_parts_of_divided_blocks_are_updated_in_backward(setting, tmp_path):
    """The biases of parts are in the stage around them. Their gradients arrive before those of weights."""
    setting = dataclasses.replace(setting, most_stage_bytes=20_000)
    job = regression(lambda: nn.Sequential(*(Divided() for _ in range(3))), 8, 64, max_norm=None)
    updated = []
    with make_engine(job, setting, tmp_path) as engine:
        stages = engine.store.stages
        engine.store.in_backward.on_hand_over = updated.append
        engine.train_step(job.batches(0), job.update(0))
        left = [stage.name for stage in stages if stage.index not in updated]
    assert [stage.name for stage in stages][:3] == ["0.up", "0.down", "0"]
    assert left == ["0.up", "0"]  # their backward is the last


@pytest.mark.parametrize("where", ["in place", "disk", "gpu"])
def test_as_many_gradients_wait_as_the_plan_counts(where, monkeypatch, tmp_path):
    job = regression(deep, 8, 32, max_norm=None)
    setting = {
        "in place": SETTINGS[0],
        "disk": Setting("disk", 2, updates="in_backward"),
        "gpu": SETTINGS[1],
    }[where]
    most = {}
    for updates in ("on_fetch", "in_backward"):
        with monkeypatch.context() as patch:
            chosen = dataclasses.replace(setting, updates=updates)
            if where == "gpu":
                device = double_of(0, patch)
                alive = Alive(patch)
                with device, on_double(job, chosen, tmp_path) as engine:
                    plan = engine.plan
                    for step in range(2):
                        engine.train_step(job.batches(step), job.update(step))
                device.end()
            else:
                alive = Alive(patch)
                with make_engine(job, chosen, tmp_path) as engine:
                    plan = engine.plan
                    for step in range(2):
                        engine.train_step(job.batches(step), job.update(step))
        most[updates] = alive.most
        footprint = Footprint(plan.trace, optimizer_state_bytes=8, base_bytes=0)
        counted = footprint.memory(plan).host["gradients"]
        assert alive.most <= counted
    # 12 equal stages: one arrives, one is complete, and a thread has one; on a GPU one more is on its way.
    assert counted * 3 <= sum(param.numel() * 4 for param in deep().parameters())
    assert most["in_backward"] * 3 <= most["on_fetch"]


def test_a_backend_of_a_users_loop_refuses_updates_in_backward():
    with pytest.raises(ConfigError, match="only for runs of params files"):
        headwater.backend("CSX", updates="in_backward")
