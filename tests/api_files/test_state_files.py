"""Files of training states: round trips through real optimizers, other formats, damage, memory."""

import os
import pickle
import resource
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headwater.api import files
from headwater.api.files import load, save
from headwater.core.errors import CheckpointError, CorruptError, DiskFullError
from headwater.core.lazy import LazyTensor


def make_training(seed):
    """Return a model with a tied weight and buffers, its optimizer and its scheduler."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(300, 80), nn.Linear(80, 80), nn.BatchNorm1d(80), nn.Linear(80, 300))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
        ],
        [2],
    )
    return model, optimizer, scheduler


def train(training, steps):
    model, optimizer, scheduler = training
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens = (torch.arange(24) * (step + 3)) % 300
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def state_of(training):
    return dict(
        zip(("model", "optimizer", "scheduler"), (part.state_dict() for part in training), strict=True)
    )


def assert_same(actual, expected):
    """Assert that values and types are the same, except that tensors may be lazy."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


def test_training_continues_from_a_file_to_the_same_bits(tmp_path):
    path = tmp_path / "checkpoint_3.mdl"
    training = make_training(0)
    train(training, 3)
    save({**state_of(training), "global_step": 3}, path)
    expected = train(training, 3)

    resumed = make_training(1)
    state = load(path)
    for part, name in zip(resumed, ("model", "optimizer", "scheduler"), strict=True):
        part.load_state_dict(state[name])
    assert state["global_step"] == 3
    assert train(resumed, 3) == expected
    assert_same(state_of(resumed), state_of(training))


@pytest.mark.parametrize("strided", [lambda t: t[::2], lambda t: t[0].expand(3, 4), lambda t: t.view(2, 5).T])
def test_tensors_with_gaps_in_memory(strided, tmp_path):
    value = strided(torch.arange(10.0))
    save({"x": value}, tmp_path / "x")
    assert torch.equal(load(tmp_path / "x")["x"], value)


def test_version_metadata_of_modules_is_kept(tmp_path):
    state = make_training(0)[0].state_dict()
    save(state, tmp_path / "x")
    loaded = load(tmp_path / "x")
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
tensors = st.builds(
    lambda dtype, shape: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
)
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(states)
def test_any_nesting_survives_a_round_trip(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state") / "x"
    save(state, path)
    assert_same(load(path), state)


def test_names_that_collide(tmp_path):
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(1), "__metadata__": torch.arange(2)}
    save(state, tmp_path / "x")
    assert_same(load(tmp_path / "x"), state)


def test_shared_tensors_are_written_once_and_stay_shared(tmp_path):
    tied = torch.randn(400, 100)
    lazy = LazyTensor.whole(lambda: tied, tied.shape, tied.dtype)
    state = {"a": tied, "b": tied, "c": tied[:200], "lazy": lazy, "same": lazy.detach()}
    save(state, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 2.6 * tied.nbytes
    loaded = load(tmp_path / "x")
    assert_same(loaded, state)
    assert loaded["a"] is loaded["b"]
    assert loaded["lazy"] is loaded["same"]


def test_is_a_safetensors_file(tmp_path):
    state = make_training(0)[0].state_dict()
    save({"model": state}, tmp_path / "x")
    found = safetensors.torch.load_file(tmp_path / "x")
    assert torch.equal(found["model/1.weight"], state["1.weight"])


def test_map_location_reads_everything(tmp_path):
    save([torch.ones(300, 300)], tmp_path / "x")
    assert type(load(tmp_path / "x")[0]) is LazyTensor
    assert type(load(tmp_path / "x", map_location="cpu")[0]) is torch.Tensor


def test_a_file_may_be_replaced_while_lazy_tensors_refer_to_it(tmp_path):
    path = tmp_path / "x"
    save({"w": torch.ones(300, 300)}, path)
    old = load(path)
    save(
        {"w": torch.zeros(200, 200), "other": old["w"]}, path
    )  # reads the old file while it writes the new one
    assert torch.equal(old["w"], torch.ones(300, 300))
    assert torch.equal(load(path)["other"], torch.ones(300, 300))


@pytest.mark.parametrize(
    "value, place",
    [
        ({"a": [1, {2, 3}]}, r"state\['a'\]\[1\] is a builtins.set"),
        ({"m": nn.Linear(1, 1)}, r"state\['m'\] is a torch.nn.modules.linear.Linear"),
        ({3: torch.empty(2, device="meta")}, r"state\[3\] is on the meta device"),
        ((torch.eye(2).to_sparse(),), r"state\[0\] is a tensor of torch.sparse_coo"),
    ],
    ids=["set", "module", "meta", "sparse"],
)
def test_unsupported_values_are_refused(tmp_path, value, place):
    with pytest.raises(CheckpointError, match=place):
        save(value, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# other formats


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "mdl"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_files(tmp_path, suffix, zipped):
    training = make_training(0)
    train(training, 1)
    state = {**state_of(training), "global_step": 7}
    path = tmp_path / f"x.{suffix}"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    assert_same(load(path), state)


def test_plain_safetensors(tmp_path):
    state = {"a": torch.randn(300, 300), "b": torch.arange(3)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, (_Bomb.target,))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickles_run_no_code(tmp_path, zipped):
    _Bomb.target = str(tmp_path / "executed")
    torch.save({"x": _Bomb()}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="more than tensors and plain values") as error:
        load(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_files_of_other_formats_are_refused(tmp_path):
    path = tmp_path / "x"
    for content in (
        b"",
        b"hello",
        os.urandom(3000),
        b"\x89HDF\r\n\x1a\n" + bytes(64),
        pickle.dumps({"a": 1}),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(path)):
            load(path)
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=str(path)):
        load(path)
    with pytest.raises(CheckpointError, match="missing"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="load_pretrained"):
        load(tmp_path)


# damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state.mdl"
    torch.manual_seed(0)
    save({"small": torch.randn(3), "large": torch.randn(300, 300), "lr": 0.125, "steps": [1, 2]}, path)
    return path


def read_all(path):
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in load(path).items()
    }


@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(saved, tmp_path_factory, data):
    """A flip may leave the contents as they are (a space in the header), but never change them silently."""
    content = bytearray(saved.read_bytes())
    header = int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, header + 100) | st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path_factory.mktemp("damaged") / "state.mdl"
    damaged.write_bytes(content)
    try:
        found = read_all(damaged)
    except (CheckpointError, CorruptError) as error:
        assert str(damaged) in str(error)
    else:
        assert_same(found, read_all(saved))


def test_flipped_byte_in_a_tensor_names_it(saved, tmp_path):
    content = bytearray(saved.read_bytes())
    content[-1000] ^= 1
    (tmp_path / "x").write_bytes(content)
    state = load(tmp_path / "x")
    with pytest.raises(CorruptError, match="tensor large"):
        state["large"].clone()
    assert torch.equal(state["small"], load(saved)["small"])


@pytest.mark.parametrize("cut", [1, 5000, 300_000])
def test_truncated_file(saved, tmp_path, cut):
    (tmp_path / "x").write_bytes(saved.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"(?s)tensor large lies outside.*/x"):
        load(tmp_path / "x")


def test_newer_version(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_FORMAT_VERSION", "2")
    save(1, tmp_path / "x")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 2"):
        load(tmp_path / "x")


def test_full_disk_leaves_the_previous_file(tmp_path):
    path = tmp_path / "x"
    save({"a": 1}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DiskFullError, match="x"):
            save({"a": torch.ones(1 << 20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_failed_source_leaves_the_previous_file(tmp_path):
    path = tmp_path / "x"
    save({"a": 1}, path)

    def read():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save([LazyTensor.whole(read, (4,), torch.float32)], path)
    assert load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_being_saved_cannot_be_saved_again(tmp_path):
    path = tmp_path / "x"
    inside, go_on = threading.Event(), threading.Event()

    def read():
        inside.set()
        assert go_on.wait(60)
        return torch.ones(4)

    thread = threading.Thread(target=save, args=([LazyTensor.whole(read, (4,), torch.float32)], path))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(CheckpointError, match="another process or thread"):
        save({"a": 1}, path)
    go_on.set()
    thread.join()
    assert torch.equal(load(path)[0], torch.ones(4))
    (tmp_path / "x.partial").write_bytes(b"left by a process that was killed")
    save({"a": 1}, path)
    assert load(path) == {"a": 1}


_MEMORY = """
import sys, torch
from headwater.api.files import load, save
from headwater.core.lazy import LazyTensor

def peak_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10

def pieces(seed):
    for step in range(8):
        yield torch.full((1 << 20,), float(seed * 8 + step))  # 4 MiB

shape = (8, 1 << 20)
state = {str(i): LazyTensor(lambda i=i: pieces(i), shape, torch.float32) for i in range(13)}  # 416 MiB
save({"warm": torch.ones(1 << 20)}, sys.argv[1])
load(sys.argv[1])["warm"].sum().item()
before = peak_mib()
save({"model": state}, sys.argv[1])
for name, tensor in load(sys.argv[1])["model"].items():
    assert tensor.sum(1).tolist() == [float(int(name) * 8 + step) * (1 << 20) for step in range(8)], name
print(peak_mib() - before)
"""


@pytest.mark.real_start
def test_memory_is_that_of_one_tensor(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "x").stat().st_size > 400 << 20
    assert int(result.stdout) < 150  # a tensor has 32 MiB, all have 416; on a busy machine 101 were measured


def test_a_file_that_another_process_finished_before_the_lock_is_not_written(tmp_path, monkeypatch):
    path, unfinished = tmp_path / "state", tmp_path / "state.partial"
    lock = files.fcntl.flock

    def finished_meanwhile(handle, operation):
        if not path.exists():
            unfinished.rename(path)  # as the other process does at the end of its save
        lock(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", finished_meanwhile)
    with files._replacing(path), unfinished.open("rb") as file, pytest.raises(BlockingIOError):
        lock(file, files.fcntl.LOCK_EX | files.fcntl.LOCK_NB)
    assert not unfinished.exists()
