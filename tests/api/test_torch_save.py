"""Files that `torch.save` writes of streamed models, compared with those of plain PyTorch."""

import copy
import errno
import json
import multiprocessing.reduction
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from any_loop import Place, adamw, extreme_plans, randn
from small_net import net, step
from torch import nn

from headwater.api.backend import backend
from headwater.api.compile import compile
from headwater.core import file_memory
from headwater.core.file_memory import copies_in_files
from headwater.core.lazy import LazyTensor
from headwater.stream.addresses import Reserved

WIDTH = 512
"""The weight of a layer with this width has 1 MiB, so it is large enough for a file."""


def tied():
    model = net()
    model[3].weight = model[0].weight
    return model


def saved(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return torch.load(path)


@extreme_plans
def test_the_file_of_a_streamed_model_is_as_large_as_that_of_a_plain_one_and_has_equal_content(
    plan, tmp_path
):
    place = Place(plan, tmp_path)
    torch.manual_seed(0)
    plain = tied()
    streamed = place.compile(copy.deepcopy(plain))
    found = []
    for model, path in ((plain, tmp_path / "plain.pt"), (streamed, tmp_path / "streamed.pt")):
        optimizer = adamw(model.parameters())
        step(model, optimizer)
        found.append(saved(model, optimizer, path))
    expected, streamed = found
    assert (tmp_path / "streamed.pt").stat().st_size <= (tmp_path / "plain.pt").stat().st_size * 1.02
    weights = streamed["model"]
    assert weights["0.weight"].data_ptr() == weights["3.weight"].data_ptr()
    for name, value in expected["model"].items():
        assert torch.equal(weights[name], value) and weights[name].stride() == value.stride(), name
    for number, state in expected["optimizer"]["state"].items():
        for name, value in state.items():
            other = streamed["optimizer"]["state"][number][name]
            assert torch.equal(other, value) and other.stride() == value.stride(), (number, name)
    place.release()


@extreme_plans
def test_copies_in_pickles_keep_their_values(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(tied())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    unpickled = pickle.loads(pickle.dumps(state))
    step(model, optimizer)
    assert all(torch.equal(unpickled[name], value) for name, value in before.items())
    alias = copy.copy(state["0.weight"])
    assert torch.equal(alias, model[0].weight) and not torch.equal(alias, before["0.weight"])
    place.release()


@extreme_plans
def test_views_of_one_tensor_have_one_storage_in_a_file(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(net())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    weight = model[1].weight
    moment = optimizer.state[weight]["exp_avg"]
    views = [weight.data, weight.data[1], weight.data.t()[2], weight.detach(), moment, moment]
    torch.save(views, tmp_path / "x")
    found = torch.load(tmp_path / "x")
    assert len({value.untyped_storage().data_ptr() for value in found}) == 2
    for view, value in zip(views, found, strict=True):
        assert torch.equal(view, value) and view.stride() == value.stride()
    place.release()


def wide(folder, **options):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    model = compile(model, backend("CSX", num_slabs=2, disk=folder, **options))
    optimizer = adamw(model.parameters())
    model(randn(2, WIDTH, seed=1)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def files(monkeypatch):
    """Collect (bytes, folder) of each copy that is put into a file."""
    found = []
    put_in_file = file_memory._put_in_file

    def noted(memory, folder):
        put_in_file(memory, folder)
        found.append((len(memory), folder))

    monkeypatch.setattr(file_memory, "_put_in_file", noted)
    return found


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_large_copies_are_in_files_of_the_disk_of_the_backend(tier, files, tmp_path):
    model, optimizer = wide(tmp_path / "scratch", tier=tier)
    files.clear()
    found = saved(model, optimizer, tmp_path / "x")
    # One weight and two moments of each of three layers.
    assert files == [(4 * WIDTH * WIDTH, tmp_path / "scratch")] * 9
    assert all(torch.equal(found["model"][name], value) for name, value in model.state_dict().items())
    assert all(
        torch.equal(found["optimizer"]["state"][number]["exp_avg"], optimizer.state[param]["exp_avg"])
        for number, param in enumerate(model.parameters())
    )


def test_large_copies_of_the_data_of_parameters_are_in_files(files, tmp_path):
    model, _ = wide(tmp_path / "scratch", tier="memory")
    files.clear()
    torch.save([param.data for param in model.parameters()], tmp_path / "x")
    assert files == [(4 * WIDTH * WIDTH, tmp_path / "scratch")] * 3


def test_without_a_disk_copies_are_in_memory_unless_the_caller_names_a_folder(files, tmp_path):
    model, optimizer = wide(None)
    saved(model, optimizer, tmp_path / "x")
    assert files == []
    model(randn(2, WIDTH, seed=1))
    with copies_in_files(tmp_path / "copies"):
        saved(model, optimizer, tmp_path / "x")
    assert files == [(4 * WIDTH * WIDTH, tmp_path / "copies")] * 9


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_copy_for_which_the_disk_takes_no_file_stays_in_memory(number, tmp_path, monkeypatch, caplog):
    model, optimizer = wide(tmp_path / "scratch", tier="memory")

    def refuse(folder):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_memory, "open_unnamed", refuse)
    found = saved(model, optimizer, tmp_path / "x")
    assert "copies of tensors stay in memory, because a file cannot be made" in caplog.text
    assert all(torch.equal(found["model"][name], value) for name, value in model.state_dict().items())


def test_a_fork_does_not_change_the_copies_of_its_parent(tmp_path):
    model, _ = wide(tmp_path / "scratch", tier="memory")
    weight = model[0].weight
    before = weight.detach().clone()
    weight.data_ptr()

    def change():
        torch.set_num_threads(1)  # a fork has no threads of OpenMP
        with torch.no_grad():
            weight.zero_()
        weight.data_ptr()

    child = multiprocessing.get_context("fork").Process(target=change)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    torch.save(weight.detach(), tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x"), before)


def test_a_stored_tensor_of_a_device_is_pickled_in_host_memory():
    """A program may keep the copies of a model that is larger than the device."""
    values = torch.arange(6.0)
    stored = LazyTensor(lambda: iter([values]), (2, 3), torch.float32, torch.device("meta"))
    found = pickle.loads(pickle.dumps(stored))
    assert found.device.type == "cpu" and torch.equal(found, values.view(2, 3))


@extreme_plans
def test_lazy_state_follows_an_optimizer_that_has_left_the_store(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(tied())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    lazy = optimizer.state_dict()["state"][0]["exp_avg"]
    place.release()
    for _ in range(2):
        step(model, optimizer)
        expected = optimizer.state[model[0].weight]["exp_avg"].flatten()
        assert torch.equal(torch.empty(0).set_(lazy.untyped_storage()), expected)
        assert torch.equal(pickle.loads(pickle.dumps(lazy)).flatten(), expected)


class Spawning:
    """A process that is being spawned. It inherits files that are open when the arguments are pickled."""

    DupFd = int

    def __init__(self):
        self.files = []

    def duplicate_for_child(self, file):
        self.files.append(file)
        return file


@extreme_plans
def test_a_state_dict_may_be_an_argument_of_a_spawned_process(plan, tmp_path, monkeypatch):
    place = Place(plan, tmp_path)
    model = place.compile(net())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    spawning = Spawning()
    monkeypatch.setattr(multiprocessing.reduction.context, "get_spawning_popen", lambda: spawning)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    multiprocessing.reduction.ForkingPickler.dumps(state)
    # Eight parameters; two moments of each, and its number of steps.
    assert len({os.fstat(file).st_ino for file in spawning.files}) == 8 + 8 * 3
    place.release()


class SlowHome:
    """A place of values that are read only when the test allows it."""

    def __init__(self):
        self.spec = SimpleNamespace(name="slow")
        self.meta = torch.empty(4, device="meta")
        self.version = "first"
        self.is_reading, self.may_read = threading.Event(), threading.Event()
        self.num_files = 0

    def read_on_host(self):
        self.is_reading.set()
        assert self.may_read.wait(60)
        return torch.ones(4)

    def put_copy_in_file(self, memory):
        self.num_files += 1
        return False


def test_memory_that_one_thread_fills_is_not_changed_by_others():
    home, reserved = SlowHome(), Reserved(16)
    first, second = (threading.Thread(target=reserved.fill, args=(home,)) for _ in range(2))
    first.start()
    assert home.is_reading.wait(60)
    second.start()
    reserved.free()
    home.may_read.set()
    first.join(60)
    second.join(60)
    assert home.num_files == 1
    found = torch.empty(0).set_(reserved.fill(home))
    reserved.free()
    assert torch.equal(found, torch.ones(4))


def test_ctrl_c_while_a_copy_is_put_in_a_file_leaves_no_file(tmp_path, monkeypatch):
    model, _ = wide(tmp_path / "scratch", tier="memory")
    map_file = file_memory.map_file

    def interrupted(memory, file):
        map_file(memory, file)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(file_memory, "map_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model[0].weight.data_ptr()
    model(randn(2, WIDTH, seed=1))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@extreme_plans
def test_values_that_another_thread_changes_during_torch_save_are_in_the_file(plan, tmp_path, monkeypatch):
    place = Place(plan, tmp_path)
    model = place.compile(net())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    weight = model[0].weight.detach()
    before, fill = weight.clone(), Reserved.fill

    def fill_and_train(reserved, home):
        found = fill(reserved, home)
        training = threading.Thread(target=lambda: [step(model, optimizer) for _ in range(2)])
        training.start()
        training.join(60)
        return found

    monkeypatch.setattr(Reserved, "fill", fill_and_train)
    torch.save(weight, tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x"), before)
    place.release()


_MEMORY = """
import json, sys, threading, time, torch
from pathlib import Path
from torch import nn
import headwater as hw

def private():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10

def watch():
    while True:
        peak[0] = max(peak[0], private())
        time.sleep(0.001)

model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
model = hw.compile(model, hw.backend("CSX", tier="disk", disk=sys.argv[1], num_slabs=2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 1024)).sum().backward()
optimizer.step()
optimizer.zero_grad()
torch.save(model[0].state_dict(), sys.argv[1] + "/first")
before = private()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1] + "/x")
print(json.dumps({"rise": peak[0] - before}))
"""


@pytest.mark.real_start
def test_torch_save_of_a_model_on_disk_takes_little_memory(tmp_path):
    """The state has 192 MiB, 4 MiB in each tensor."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # what is freed goes back to the system
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["rise"] < 48 << 20
