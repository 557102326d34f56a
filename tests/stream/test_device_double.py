"""On a device with late copies the engine computes the bits of plain PyTorch, and orders all that it does.

`pytest tests/stream/test_device_double.py --device-seeds 1000` runs each test with 1,000 seeds.
"""

import contextlib
import dataclasses
import functools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpt_job import gpt_job, plain_gpt
from harness import (
    SEED,
    History,
    Setting,
    assert_equal,
    collect,
    make_plan,
    make_trace,
    regression,
    train_plain,
)
from test_own_models import DECODERS
from test_own_models import job as own_job
from tests.device_double import ComputeStream, CopyStream, DeviceDouble, DoubleEvent, stand_in_for_cuda
from torch import nn
from zoo_jobs import NAMES, zoo_job

from headwater.core.buffers import PAGE_BYTES, round_up
from headwater.core.errors import HeadwaterError, StoreError
from headwater.core.streams import REACHED
from headwater.optim.spec import OptimizerSpec
from headwater.store.locks import StageLocks
from headwater.store.stages import ImageCopies
from headwater.stream.engine import Engine
from headwater.stream.host_arena import HostArena, InFlight
from headwater.stream.options import DEFAULTS
from headwater.stream.slab_loader import SlabLoader


def double_of(seed, monkeypatch):
    """Replace CUDA by a double."""
    device = DeviceDouble(seed)
    stand_in_for_cuda(device, monkeypatch)
    return device


@pytest.fixture
def double(device_seed, monkeypatch):
    device = double_of(device_seed, monkeypatch)
    yield device
    device.end()


def on_double(job, setting, folder, options=DEFAULTS, trace=None):
    model = job.model()
    plan = dataclasses.replace(make_plan(job, model, setting, folder, trace), device="cuda")
    return Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss, options=options)


def trained(job, setting, folder, device, steps, trace=None):
    """Train on the double. The computing thread has random delays, too."""
    history, late = History(), random.Random(device.seed)
    with device, on_double(job, setting, folder, trace=trace) as engine:
        for step in range(steps):
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
            time.sleep(late.choice((0, 0, 0.003)))
        collect(engine, history)
    return history


def layers():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.LayerNorm(16))))


def half_frozen():
    model = layers()
    for param in model[2:4].parameters():
        param.requires_grad_(False)
    return model


def optimized(name, **options):
    return regression(layers, 8, 16, optimizer=OptimizerSpec(name, {"lr": 0.01, **options}))


JOBS = {
    **{name: functools.partial(zoo_job, name) for name in NAMES},
    **{name: functools.partial(own_job, name) for name in DECODERS},
    "unclipped": lambda: regression(layers, 8, 16, max_norm=None),
    "clipped by value": lambda: regression(layers, 8, 16, max_norm=0.1, max_value=1e-3),
    "SGD": lambda: optimized("SGD", momentum=0.9, nesterov=True),
    "RMSprop": lambda: optimized("RMSprop", centered=True),
    "Adafactor": lambda: optimized("Adafactor"),
    "half frozen": lambda: regression(half_frozen, 8, 16),
}
"""Models, optimizers and ways to clip of the tests that compare bits with plain PyTorch."""


@functools.cache
def plain(name):
    return train_plain(JOBS[name](), steps=2)


@functools.cache
def traced(make_job):
    """Return the dry run of a job, which is the same for all seeds."""
    job = make_job()
    return make_trace(job, job.model(), Setting())


def test_any_model_on_a_late_device_equals_plain_pytorch(double, device_seed, tmp_path):
    name = random.Random(f"job {device_seed}").choice(sorted(JOBS))
    setting, _ = any_setting(device_seed)
    history = trained(JOBS[name](), setting, tmp_path, double, 2, traced(JOBS[name]))
    assert_equal(history, plain(name))


def any_setting(seed):
    """Return a setting and a number of micro-batches, both by the seed."""
    choose = random.Random(f"setting {seed}").choice
    tier = choose(("memory", "memory", "disk"))
    gradients = choose(("memory", "disk")) if tier == "disk" else "memory"
    activations = choose(("keep", "selective", "recompute", "offload"))
    in_memory = choose(((), (0, 2))) if tier == "disk" else ()
    return Setting(tier, choose((2, 3, 99)), activations, gradients, in_memory=in_memory), choose((1, 1, 3))


def test_any_setting_on_a_late_device_equals_plain_pytorch(double, device_seed, tmp_path):
    setting, micro_batches = any_setting(device_seed)
    history = trained(gpt_job(micro_batches=micro_batches), setting, tmp_path, double, 2, traced(gpt_job))
    assert_equal(history, plain_gpt(2, micro_batches=micro_batches))


@functools.cache
def plain_unclipped(micro_batches):
    return train_plain(gpt_job(micro_batches=micro_batches, max_norm=None), steps=2)


def test_updates_in_backward_on_a_late_device_equal_plain_pytorch(double, device_seed, tmp_path):
    setting, micro_batches = any_setting(device_seed)
    on_device = random.Random(f"stages {device_seed}").choice(((), (), (1, 3)))
    setting = dataclasses.replace(setting, updates="in_backward", on_device=on_device)
    job = gpt_job(micro_batches=micro_batches, max_norm=None)
    history = trained(job, setting, tmp_path, double, 2, traced(gpt_job))
    assert_equal(history, plain_unclipped(micro_batches))


def never(self, event):
    """Do not wait."""


def without_waiting(event):
    """Return at once; the event is not reached yet."""


def nothing(self, *arguments):
    """Do nothing."""


def lend_twice(self, num_bytes):
    """Lend memory that counts as returned at once."""
    size = max(round_up(num_bytes), PAGE_BYTES)
    block = self._take_idle(size) or self._new(size)
    self._returned.append(block)
    self._sort_returned()
    return torch.from_numpy(block.pages.numpy()[:num_bytes])


IN_MEMORY, OFFLOADED, ON_DISK = Setting(), Setting(activations="offload"), Setting("disk")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "setting"),
    [
        (ComputeStream, "wait", never, IN_MEMORY),  # weights are used before they have arrived
        (CopyStream, "wait", never, IN_MEMORY),  # a slab is filled while it is read
        (DoubleEvent, "synchronize", without_waiting, IN_MEMORY),  # a gradient is added before it has arrived
        (InFlight, "add", lambda self, copied, *ends: None, OFFLOADED),  # an activation is freed too early
        (CopyStream, "record", lambda self: REACHED, OFFLOADED),
        (SlabLoader, "_last_copy", property(lambda self: REACHED, nothing), ON_DISK),  # two use one buffer
        (HostArena, "lend", lend_twice, IN_MEMORY),  # a gradient arrives over one that is being added
    ],
    ids=[
        "compute waits", "copies wait", "threads wait", "kept alive", "events", "staging reused early",
        "host memory reused early",
    ],
)  # fmt: skip
def test_a_missing_order_is_found(owner, name, fault, setting, monkeypatch, tmp_path):
    monkeypatch.setattr("tests.device_double.DELAYS_S", (0.002,))
    device, job = double_of(0, monkeypatch), gpt_job()
    monkeypatch.setattr(owner, name, fault, raising=False)
    with pytest.raises((AssertionError, HeadwaterError)):
        history = trained(job, setting, tmp_path, device, 2)
        assert device.races == []
        assert_equal(history, plain_gpt(2))


@pytest.mark.parametrize("held", [True, False])
def test_a_lock_that_is_released_early_is_found(held, monkeypatch, tmp_path):
    device, queued, written = double_of(0, monkeypatch), threading.Event(), threading.Event()
    note = ImageCopies.note

    def note_late(self, stage, copied):
        queued.set()
        # With the lock held, the writer waits for this thread.
        written.wait(0.1 if held else 10)
        note(self, stage, copied)

    @contextlib.contextmanager
    def released_early(self, stage, *, before_step=False):
        with self.exclusive(stage):
            pass
        yield

    monkeypatch.setattr("tests.device_double.DELAYS_S", (0.05,))
    with contextlib.ExitStack() as closed:
        engine = on_double(regression(layers, 8, 16), Setting(), tmp_path)
        if not held:  # the race ends the engine
            closed.enter_context(contextlib.suppress(AssertionError))
        closed.enter_context(engine)
        store, slab, stream = engine.store, device.allocate_slab(4096), device.new_stream()
        monkeypatch.setattr(ImageCopies, "note", note_late)
        if not held:
            monkeypatch.setattr(StageLocks, "whole", released_early)
        zeros = torch.zeros_like(store.parameters.read_param((0, 0)))

        def write():
            assert queued.wait(200)
            with contextlib.suppress(AssertionError):  # the device remembers it
                store.parameters.write_param((0, 0), zeros)
            written.set()

        with ThreadPoolExecutor(1) as writer:
            done = writer.submit(write)
            store.fetch(0, slab, None, stream)
            done.result()
    assert (device.races == []) == held


@pytest.mark.parametrize("waits", [True, False])
def test_a_weight_is_written_after_the_copies_that_read_it(waits, monkeypatch, tmp_path):
    monkeypatch.setattr("tests.device_double.DELAYS_S", (0.01,))
    if not waits:
        monkeypatch.setattr(ImageCopies, "wait", lambda self, stage: None)
    device = double_of(0, monkeypatch)
    with on_double(regression(layers, 8, 16), Setting(), tmp_path) as engine:
        slab, stream = device.allocate_slab(4096), device.new_stream()
        weight = engine.store.parameters.read_param((0, 0))
        engine.store.fetch(0, slab, None, stream)
        engine.store.parameters.write_param((0, 0), torch.zeros_like(weight))
        stream.record().synchronize()
        copied = engine.store.stages[0].views(slab)[0]
        assert torch.equal(copied, weight) == waits
    assert bool(device.races) != waits


def test_hooks_of_a_users_loop_read_gradients_that_are_on_their_way(double, tmp_path):
    job, seen, wanted = regression(layers, 8, 16, max_norm=None), {}, {}
    plain = job.model()
    plain(job.make_batch(0, 0)).sum().backward()
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    with double, on_double(job, Setting(user_loop=True), tmp_path) as engine:
        params = dict(engine.model.named_parameters())
        last = params["6.weight"]
        params["2.weight"].register_post_accumulate_grad_hook(
            lambda param: seen.update(mid=last.grad.clone())
        )
        engine.model(job.make_batch(0, 0)).sum().backward()
        seen |= {name: param.grad.clone() for name, param in params.items()}
    assert torch.equal(seen.pop("mid"), wanted["6.weight"])
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


def test_a_step_uses_the_page_locked_memory_of_the_step_before(monkeypatch, tmp_path):
    device, job, locked = double_of(0, monkeypatch), gpt_job(), []
    with device, on_double(job, Setting(activations="offload"), tmp_path) as engine:
        for step in range(5):
            engine.train_step(job.batches(step), job.update(step))
            locked.append(device.num_locks)
    device.end()
    # Late copies differ from step to step, and with them the blocks that are lent at one time.
    assert locked[-1] < 2 * locked[0], "5 times as many without reuse"


def test_a_step_that_fails_leaves_no_gradient_on_its_way(double, tmp_path):
    job = regression(layers, 8, 16)
    broken = dataclasses.replace(
        job, make_batch=lambda step, index: job.make_batch(step, index) * float("nan")
    )
    with double, on_double(job, Setting(), tmp_path) as engine:
        with pytest.raises(HeadwaterError, match="is nan"):
            engine.train_step(broken.batches(0), job.update(0))
        history = History()
        for step in range(2):
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    assert_equal(history, train_plain(job, steps=2))


def fail_twice(engine, gate):
    """Make the first two additions of gradients of the first stage fail, once `gate` is set."""
    add, left = engine.store.add_gradient, [0, 1]

    def fail(key, *args, **kwargs):
        if key[0] != 0 or not left:
            return add(key, *args, **kwargs)
        left.pop()
        assert gate.wait(200)
        raise StoreError("no room for a gradient")

    engine.store.add_gradient = fail


def test_closing_releases_all_memory_and_threads_if_a_gradient_cannot_be_added(double, tmp_path):
    job, gate = regression(layers, 8, 16, max_norm=None), threading.Event()
    others = set(threading.enumerate())  # an earlier test may have left some
    engine = on_double(job, Setting("disk", 2, user_loop=True), tmp_path)
    threads = set(threading.enumerate()) - others
    assert any(each.name.startswith("headwater") for each in threads)
    with double:
        fail_twice(engine, gate)
        engine.model(job.make_batch(0, 0)).sum().backward()
    gate.set()
    with pytest.raises(StoreError, match="no room"):
        engine.close()
    assert not [each.name for each in threads if each.name.startswith("headwater") and each.is_alive()]
    del engine  # its gradients are in page-locked memory
    double.end()


def test_a_step_after_gradients_that_could_not_be_added_is_exact(double, tmp_path):
    job, gate = regression(layers, 8, 16), threading.Event()
    with double, on_double(job, Setting(), tmp_path) as engine:
        fail_twice(engine, gate)
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(StoreError, match="no room"):
            engine.train_step(job.batches(0), job.update(0))
        history = History()
        report = engine.train_step(job.batches(0), job.update(0))
        history.losses.append(report.loss)
        history.norms.append(report.gradient_norm)
        collect(engine, history)
    assert_equal(history, train_plain(job, steps=1))
