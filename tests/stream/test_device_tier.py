"""Stages whose masters, moments and updates are in device memory train with the bits of plain PyTorch."""

import dataclasses
import random
import threading
import time

import pytest
import torch
from gpt_job import gpt_job, plain_gpt
from harness import SEED, History, Setting, assert_equal, collect, make_plan, regression, train_plain
from test_device_double import double_of, layers, on_double, trained
from tests.device_double import ComputeStream, DoubleEvent
from torch import nn

from headwater.core.errors import HeadwaterError, NonFiniteError, StoreError
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.sparsity.schedules import Cadence, Constant
from headwater.sparsity.sparsifier import Sparsifier, Sparsity
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.stream.engine import Engine
from headwater.trainer.sparse import SparseTraining

EVERY = tuple(range(8))
MIXES = [
    Setting("memory", 2, on_device=(1, 3)),
    Setting("memory", 3, "recompute", on_device=(0, 5, 6)),
    Setting("disk", 2, "recompute", on_device=(0, 2)),
    Setting("disk", 2, gradient_tier="disk", in_memory=(1, 3), on_device=(2, 4)),
    Setting("memory", 2, on_device=EVERY),
]
MIXED = Precision("bf16")


@pytest.fixture
def double(monkeypatch):
    device = double_of(1, monkeypatch)
    yield device
    device.end()


def steps_of(engine, job, history, steps):
    for step in steps:
        report = engine.train_step(job.batches(step), job.update(step))
        history.losses.append(report.loss)
        history.norms.append(report.gradient_norm)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("setting", MIXES, ids=str)
def test_every_mix_of_device_memory_host_memory_and_disk_equals_plain_pytorch(
    setting, micro_batches, double, tmp_path
):
    job = regression(layers, 8, 16, micro_batches=micro_batches)
    assert_equal(trained(job, setting, tmp_path, double, 3), train_plain(job, steps=3))


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute from host"])
def test_a_gpt_with_tied_weights_on_the_device_equals_plain_pytorch(activations, double, tmp_path):
    setting = Setting("disk", 2, activations, in_memory=(1,), on_device=(0, 2))
    assert_equal(trained(gpt_job(micro_batches=3), setting, tmp_path, double, 2), plain_gpt(2, 3))


def test_bytes_over_the_link_fall_in_proportion_to_the_stages_on_the_device(double, tmp_path):
    job, moved = regression(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))), 8, 16), []
    for count in (0, 2, 4, 8):
        with double, on_double(job, Setting(slabs=99, on_device=EVERY[:count]), tmp_path) as engine:
            for step in range(2):
                report = engine.train_step(job.batches(step), job.update(step))
            moved.append(report.statistics.bytes_in)
    assert moved[0] > 0
    assert moved == [moved[0] * share // 8 for share in (8, 6, 4, 0)]


def test_gradients_and_updates_of_a_stage_on_the_device_use_no_page_locked_memory(double, tmp_path):
    job = regression(layers, 8, 16, max_norm=None)
    with double, on_double(job, Setting(on_device=EVERY), tmp_path) as engine:
        lent = []
        lend = engine.executor._arena.lend
        engine.executor._arena.lend = lambda count: lent.append(count) or lend(count)
        steps_of(engine, job, History(), range(2))
    assert max(lent) == 4, "only norms are copied"


def test_gradients_that_wait_for_their_addition_have_no_more_bytes_than_the_largest_stage(double, tmp_path):
    job = regression(layers, 8, 16, micro_batches=3, max_norm=None)
    with double, on_double(job, Setting(on_device=EVERY), tmp_path) as engine:
        store, copies = engine.store, engine.executor._gradients._copies
        add, send, waiting = store.add_gradient, copies.send, [0]

        def added_late(key, gradient, **options):
            time.sleep(2e-3)
            waiting.append(waiting[-1] - gradient.nbytes)
            add(key, gradient, **options)

        def sent(key, gradient, **options):
            waiting.append(waiting[-1] + gradient.nbytes)
            send(key, gradient, **options)

        store.add_gradient, copies.send = added_late, sent
        steps_of(engine, job, History(), range(1))
    largest = 4 * (16 * 16 + 16)
    assert max(waiting) <= 2 * largest, "the limit, and the gradient that is sent"


def test_gradients_that_are_read_again_wait_for_nothing(double, monkeypatch, tmp_path):
    job = regression(layers, 8, 16, max_norm=None)
    with double, on_double(job, Setting(on_device=(0, 2), user_loop=True), tmp_path) as engine:
        engine.model(job.make_batch(0, 0)).sum().backward()
        weight = dict(engine.model.named_parameters())["0.weight"]
        first = weight.grad.clone()
        with monkeypatch.context() as patch:
            patch.setattr(DoubleEvent, "synchronize", lambda event: pytest.fail("a read has waited"))
            assert torch.equal(weight.grad, first)


def test_an_update_by_another_thread_comes_after_changes_of_the_gradients(double, tmp_path):
    job = regression(layers, 8, 16, max_norm=None)
    with double, on_double(job, Setting(on_device=(0, 2), user_loop=True), tmp_path) as engine:
        engine.model(job.make_batch(0, 0)).sum().backward()
        dict(engine.model.named_parameters())["0.weight"].grad.mul_(0.5)
        changed = double.compute.record()
        engine.store.commit(job.update(0))
        updating = ComputeStream(double, "the stream of another thread")
        engine.store.tier.on_device(0).await_change(updating)
        assert updating.clock["compute"] > changed.clock["compute"]


@pytest.mark.parametrize("bf16_state", [False, True])
def test_a_bf16_run_has_the_bits_of_the_run_with_all_stages_in_host_memory(bf16_state, double, tmp_path):
    job, runs = regression(layers, 8, 16, micro_batches=2), []
    for on_device in ((), (0, 3), EVERY):
        setting = Setting("memory", 2, on_device=on_device, precision=MIXED)
        model = job.model()
        plan = dataclasses.replace(make_plan(job, model, setting, tmp_path), device="cuda")
        if bf16_state:
            plan = dataclasses.replace(plan, trace=plan.trace.storing("bf16"))
        history = History()
        with double, Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss) as engine:
            steps_of(engine, job, history, range(3))
            collect(engine, history)
        runs.append(history)
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])


@pytest.mark.parametrize("saved", MIXES[::2], ids=str)
@pytest.mark.parametrize("resumed", MIXES[1::3], ids=str)
def test_a_checkpoint_resumes_under_another_mix(saved, resumed, double, tmp_path):
    job, history = regression(layers, 8, 16), History()
    with double:
        with on_double(job, saved, tmp_path / "a") as engine:
            steps_of(engine, job, history, range(2))
            Snapshot(engine.store, tmp_path / "checkpoint", 2).run()
        with on_double(job, resumed, tmp_path / "b") as engine:
            SavedCheckpoint(tmp_path / "checkpoint").restore(engine.store)
            steps_of(engine, job, history, range(2, 4))
            collect(engine, history)
    assert_equal(history, train_plain(job, steps=4))


def test_a_checkpoint_is_written_on_another_thread_while_the_next_steps_run(double, tmp_path):
    job, history = regression(layers, 8, 16), History()
    setting = Setting(on_device=(0, 2, 3, 5))
    with double, on_double(job, setting, tmp_path) as engine:
        for step in range(4):
            steps_of(engine, job, history, [step])
            writing = threading.Thread(target=Snapshot(engine.store, tmp_path / str(step), step + 1).run)
            writing.start()
            steps_of(engine, job, History(), [])
            if step == 1:
                writing.join()
        writing.join()
        collect(engine, history)
        assert_equal(history, train_plain(job, steps=4))
        for step in range(4):
            SavedCheckpoint(tmp_path / str(step)).restore(engine.store)
            weights = collect(engine, History()).weights
            expected = train_plain(job, steps=step + 1).weights
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_failed_step_leaves_no_trace(micro_batches, double, tmp_path):
    job = regression(layers, 8, 16, micro_batches=micro_batches)
    history = History()
    with double, on_double(job, Setting(on_device=(0, 2, 3)), tmp_path) as engine:
        steps_of(engine, job, history, range(1))
        nan = [batch * float("nan") for batch in job.batches(1)]
        with pytest.raises(HeadwaterError, match="is nan"):
            engine.train_step(nan, job.update(1))
        infinite = [batch * 1e30 for batch in job.batches(1)]
        with pytest.raises(NonFiniteError):
            engine.train_step(infinite, job.update(1))
        steps_of(engine, job, history, range(1, 3))
        collect(engine, history)
    assert_equal(history, train_plain(job, steps=3))


def test_masked_weights_stay_zero_as_in_host_memory(double, tmp_path):
    job, runs = regression(layers, 8, 16), []
    for on_device in ((), (0, 2, 3)):
        history = History()
        with double, on_double(job, Setting(on_device=on_device), tmp_path) as engine:
            shapes = {name: value.shape for name, value in engine.named_masters()}
            group = Sparsity(Constant(0.5), "rigl", "random", Constant(0.3), Cadence(2), ("*.weight",))
            sparse = SparseTraining(Sparsifier([group], shapes, seed=SEED), engine.store)
            sparse.begin()

            def change_masks(update, sparse=sparse):
                sparse.before_update(update.step + 1)

            for step in range(3):
                report = engine.train_step(job.batches(step), job.update(step), change_masks)
                history.losses.append(report.loss)
                history.norms.append(report.gradient_norm)
            collect(engine, history)
        runs.append(history)
    assert (runs[1].weights["0.weight"] == 0).float().mean() == 0.5
    assert_equal(*runs)


class Bag(nn.Module):
    """An embedding with sparse gradients, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 4, sparse=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.embedding((x.abs() * 5).long().clamp(max=11)))


def test_sparse_gradients_stay_on_the_device(double, tmp_path):
    job = regression(Bag, 3, 5, optimizer=OptimizerSpec("SGD", {"lr": 0.1}), max_norm=None, micro_batches=2)
    runs = [trained(job, Setting(on_device=on_device), tmp_path, double, 3) for on_device in ((), (0, 1))]
    assert_equal(*runs)


def test_a_users_loop_reads_and_changes_gradients_and_weights_on_the_device(double, tmp_path):
    job = regression(layers, 8, 16, max_norm=None)
    found = []
    for on_device in ((), (0, 2)):
        with (
            double,
            on_double(job, Setting(on_device=on_device, user_loop=True), tmp_path) as engine,
        ):
            for step in range(2):
                params = dict(engine.model.named_parameters())
                engine.model(job.make_batch(step, 0)).sum().backward()
                params["0.weight"].grad.mul_(0.5)
                params["2.weight"].grad = torch.ones_like(params["2.weight"].grad)
                engine.store.commit(job.update(step))
                with torch.no_grad():
                    params["2.weight"].mul_(0.9)
            found.append(collect(engine, History()).weights)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_step_that_is_rolled_back_gives_back_gradients_and_weights(double, tmp_path):
    job = regression(layers, 8, 16, max_norm=None)
    with double, on_double(job, Setting(on_device=(0, 2), user_loop=True), tmp_path) as engine:
        engine.model(job.make_batch(0, 0)).sum().backward()
        weight = dict(engine.model.named_parameters())["0.weight"]
        before, gradient = weight.detach().clone(), weight.grad.clone()
        engine.store.begin_transaction()
        engine.store.commit(job.update(0))
        assert engine.store.roll_back()
        assert torch.equal(weight.grad, gradient)
        assert torch.equal(weight.detach().clone(), before)
        engine.store.commit(job.update(0))
        assert not torch.equal(weight.detach().clone(), before)


def test_an_update_without_an_order_after_a_copy_of_the_stage_is_found(monkeypatch, tmp_path):
    device = double_of(0, monkeypatch)
    job = regression(layers, 8, 16)
    with device, on_double(job, Setting(on_device=(0,)), tmp_path) as engine:
        steps_of(engine, job, History(), range(1))
        stage = engine.store.tier.on_device(0)
        host = device.allocate_slab(stage.wire.numel())
        stream = device.new_stream()
        stream.copy(host, stage.wire)  # nothing waits for it
        with pytest.raises(AssertionError):
            steps_of(engine, job, History(), range(1, 2))
            device.end()


def test_any_mix_equals_plain_pytorch(device_seed, monkeypatch, tmp_path):
    choose = random.Random(f"mix {device_seed}")
    tier = choose.choice(("memory", "disk"))
    where = {stage: choose.choice(("device", "memory", "tier")) for stage in EVERY}
    setting = Setting(
        tier,
        choose.choice((2, 3, 99)),
        choose.choice(("keep", "recompute")),
        choose.choice(("memory", "disk")),
        in_memory=tuple(s for s in EVERY if where[s] == "memory" and tier == "disk"),
        on_device=tuple(s for s in EVERY if where[s] == "device"),
    )
    device = double_of(device_seed, monkeypatch)
    job = regression(layers, 8, 16, micro_batches=choose.choice((1, 3)))
    assert_equal(trained(job, setting, tmp_path, device, 3), train_plain(job, steps=3))
    device.end()


def test_a_device_without_room_is_an_error_that_says_what_to_set(double, monkeypatch, tmp_path):
    job, left = regression(layers, 8, 16), [3]
    allocate = double.allocate_slab

    def allocated(num_bytes):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(num_bytes)

    monkeypatch.setattr(double, "allocate_slab", allocated)
    with pytest.raises(StoreError, match="the device has no room") as refused:
        on_double(job, Setting(on_device=(1, 2, 3)), tmp_path)
    assert "stages_on_device" in refused.value.remedy
