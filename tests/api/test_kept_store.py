"""A larger batch gets a new plan, whose engine uses the store of the engine before it."""

import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from any_loop import PLANS, Net, Place, adamw, assert_equal, batches, check, loss_of, odd_plans
from torch import nn

import headwater as hw
from headwater.api.compile import streamed
from headwater.core.buffers import aligned_empty
from headwater.core.errors import StreamError


def one_step(model, optimizer, size):
    """Take a step with a batch of this size, and return its loss."""
    ((inputs, targets),) = batches(1, size=size, seed=size)
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("plan", PLANS)
def test_all_larger_batches_use_one_store_and_the_bits_are_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses, stores, engines = [], set(), set()
        for size in [2, 5, 1, 9, 3, 11]:
            losses.append(one_step(model, optimizer, size))
            if place.plan is not None:
                engine = streamed(model).engine
                stores.add(engine.store)
                engines.add(engine)
        assert place.plan is None or (len(stores), len(engines)) == (1, 4)
        return losses, model, optimizer

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", PLANS)
def test_an_update_that_waits_and_a_gradient_that_is_summed_stay_in_the_store(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for sizes in [(2, 3), (5, 7), (8,)]:
            optimizer.zero_grad()
            for size in sizes:  # the larger ones are planned while a gradient or an update waits
                ((inputs, targets),) = batches(1, size=size, seed=size)
                loss = loss_of(model(inputs), targets)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        return losses, model, optimizer

    check(script, plan, tmp_path)


class Counted:
    """A count of the bytes of the memory tiers' blocks that are alive: now, and at most so far."""

    def __init__(self):
        self.alive = self.most = 0

    def allocate(self, num_bytes):
        block = aligned_empty(num_bytes)
        self.alive += block.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(block.untyped_storage(), self._free, block.nbytes).atexit = False
        return block

    def _free(self, num_bytes):
        self.alive -= num_bytes


def test_the_bytes_of_the_store_do_not_grow_for_a_larger_batch(monkeypatch, tmp_path):
    counted = Counted()
    monkeypatch.setattr("headwater.fabric.fabric.aligned_empty", counted.allocate)
    place = Place("slabs", tmp_path)
    model = place.compile(Net(width=64))
    optimizer = adamw(model.parameters())
    one_step(model, optimizer, 2)
    store = counted.most
    assert 12 * sum(param.numel() for param in model.parameters()) < store
    one_step(model, optimizer, 9)
    assert counted.most < 1.1 * store  # with the pages in which slabs are listed
    # An optimizer with other state needs another store, and then both are in memory for a moment.
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 9)
    assert counted.most > 1.4 * store
    place.release()


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import headwater as hw

torch.set_num_threads(1)
WIDTH, DEPTH = 1024, 12  # 4 MiB of weights a stage; 192 MiB with the state of Adam

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
model = hw.compile(model, hw.backend("CSX", tier="memory", num_slabs=2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

def step(rows):
    optimizer.zero_grad()
    model(torch.ones(rows, WIDTH)).square().mean().backward()
    optimizer.step()

step(2), step(2)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
step(4), step(8)
print(json.dumps({"rise": status("VmHWM") - before, "state": 16 * DEPTH * WIDTH * WIDTH}))
"""


@pytest.mark.real_start
def test_the_memory_of_the_process_does_not_grow_by_a_store():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        # What is freed goes back to the system at once.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The gradients of a step, 48 MiB, may be in memory at the peak and not before it.
    assert found["rise"] < found["state"] / 2


def test_a_model_that_changes_gets_a_new_store(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(Net())
    optimizer = adamw(model.parameters())
    one_step(model, optimizer, 2)
    first = streamed(model).engine.store
    model.head = nn.Linear(12, 5)
    one_step(model, adamw(model.parameters()), 3)
    assert streamed(model).engine.store is not first
    place.release()


def test_a_parameter_that_is_trained_later_gets_a_new_store(tmp_path):
    def script(place):
        model = Net()
        model.embedding.requires_grad_(False)
        model = place.compile(model)
        one_step(model, adamw(model.parameters()), 2)
        before = None if place.plan is None else streamed(model).engine.store
        model.embedding.requires_grad_(True)
        one_step(model, adamw(model.parameters()), 3)
        assert place.plan is None or streamed(model).engine.store is not before
        return model

    check(script, "memory", tmp_path)


def test_a_checkpoint_after_a_larger_batch_has_the_values_of_plain_pytorch(tmp_path):
    states = []
    for plan in (None, "slabs"):
        torch.manual_seed(0)
        place = Place(plan, tmp_path)
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        for size in (2, 6):
            one_step(model, optimizer, size)
        file = tmp_path / f"{plan}.mdl"
        hw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, str(file))
        states.append(hw.load(str(file)))
        place.release()
    assert_equal(states[1]["model"], states[0]["model"])


def fail(*arguments, **options):
    raise MemoryError("as if an allocation had failed")


@odd_plans
@pytest.mark.parametrize("part", ["make_weights", "Executor", "MicroBatches"])
def test_values_stay_if_the_engine_of_a_larger_batch_cannot_be_built(plan, part, tmp_path, monkeypatch):
    def script(place):
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        results = [one_step(model, optimizer, 2)]
        optimizer.zero_grad()
        ((inputs, targets),) = batches(1)
        loss_of(model(inputs[:2]), targets[:2]).backward()
        if place.plan is not None:
            with monkeypatch.context() as broken, pytest.raises(MemoryError):
                broken.setattr(f"headwater.stream.engine.{part}", fail)
                model(inputs)
        results += [{name: value.clone() for name, value in model.state_dict().items()}]
        results += [[param.grad.clone() for param in model.parameters()]]
        optimizer.step()
        results += [one_step(model, optimizer, size) for size in (1, 5, 7)]
        return results, model, optimizer

    check(script, plan, tmp_path)


@odd_plans
def test_a_backward_raises_if_a_later_engine_could_not_be_built(plan, tmp_path, monkeypatch):
    place = Place(plan, tmp_path)
    model = place.compile(Net())
    ((inputs, targets),) = batches(1)
    loss = loss_of(model(inputs[:2]), targets[:2])
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr("headwater.stream.engine.make_weights", fail)
        model(inputs)
    with pytest.raises(RuntimeError if plan == "memory" else StreamError, match=r"in-?place|new plan failed"):
        loss.backward()
    place.release()


def test_a_batch_whose_dry_run_failed_is_planned_when_it_comes_again(tmp_path):
    place = Place("slabs", tmp_path)
    model = place.compile(Net())
    optimizer = adamw(model.parameters())
    one_step(model, optimizer, 2)
    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        one_step(model, optimizer, 9)
    handle.remove()
    one_step(model, optimizer, 9)
    assert streamed(model).engine.plan.trace.micro_batch_size == 9
    place.release()
