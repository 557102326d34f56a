"""A checkpoint loads bit for bit as it was saved, with every plan."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_runs import (
    ADAFACTOR,
    ADAMW,
    FROZEN,
    LARGE,
    MOMENTUM,
    SHAPES,
    UNUSED,
    assert_same,
    contents,
    load_checkpoint,
    make_store,
    train,
)

from headwater.core.errors import ConfigError
from headwater.store.snapshot_load import load_weights
from headwater.trainer.checkpoint import CheckpointManager, persistent_buffers
from headwater.trainer.checkpoint_inspection import describe

WIRES = [torch.float32, torch.bfloat16]


def save(store, model_dir: Path, step: int, state=None, **options) -> Path:
    manager = CheckpointManager(model_dir)
    path = manager.save(store, step, state or {}, **options)
    manager.wait()
    return path


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM, ADAFACTOR], ids=lambda spec: spec.name)
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_resumed_store_equals_an_uninterrupted_one(tmp_path, tier, wire, optimizer):
    def new_store(name):
        folder = tmp_path / name if tier == "disk" else None
        return make_store(folder, wire=wire, optimizer=optimizer, shapes=LARGE)

    undisturbed, resumed = new_store("a"), new_store("b")
    for step in range(3):
        train(undisturbed, step)
    path = save(undisturbed, tmp_path, 3)
    assert load_checkpoint(resumed, path) == (3, {})
    assert_same(undisturbed, resumed)
    for step in range(3, 5):
        train(undisturbed, step)
        train(resumed, step)
    assert_same(undisturbed, resumed)
    undisturbed.close()
    resumed.close()


def test_a_checkpoint_loads_with_other_stages_and_dtypes(tmp_path):
    written = make_store(wire=torch.bfloat16, shapes=LARGE)
    for step in range(2):
        train(written, step)
    path = save(written, tmp_path, 2)
    one_stage = make_store(tmp_path / "tier", wire=torch.float16, stages=[list(LARGE)[::-1]], shapes=LARGE)
    load_checkpoint(one_stage, path)
    assert_same_by_name(contents(written), contents(one_stage))
    one_stage.close()


def assert_same_by_name(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name


def test_weight_files_hold_the_state_dict_of_the_model(tmp_path):
    store = make_store(wire=torch.bfloat16)
    train(store, 0)
    buffers = {"norm.count": torch.tensor(7), "norm.mean": torch.rand(3)}
    path = save(store, tmp_path, 1, buffers=buffers)
    loaded = {}
    for file in path.glob("weights_*.safetensors"):
        loaded |= safetensors.torch.load_file(file)
    masters = {name: value for name, value in contents(store).items() if "/" not in name}
    assert loaded.keys() == {*masters, *buffers}
    for name, master in masters.items():
        assert loaded[name].dtype is torch.float32
        assert loaded[name].shape == SHAPES[name]
        assert torch.equal(loaded[name].view(-1), master), name
    assert torch.equal(loaded["norm.mean"], buffers["norm.mean"])


def test_optimizer_files_hold_no_leftovers(tmp_path):
    store = make_store()  # fills states with NaN before the first update
    train(store, 0)
    path = save(store, tmp_path, 1)
    tensors = {}
    for file in path.glob("optimizer_*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    assert not any(values.isnan().any() for values in tensors.values())
    assert f"{UNUSED}/exp_avg" in tensors
    assert f"{FROZEN}/exp_avg" not in tensors


def test_same_state_gives_the_same_files(tmp_path):
    paths = []
    for name in ("a", "b"):
        store = make_store(tmp_path / "tier" / name if name == "b" else None)
        train(store, 0)
        paths.append(save(store, tmp_path / name, 1, {"seed": 1}))
        store.close()
    files = [{file.name: file.read_bytes() for file in path.iterdir()} for path in paths]
    assert files[0] == files[1]


def test_state_and_buffers_come_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model.register_buffer("mask", torch.ones(2), persistent=False)
    model(torch.rand(8, 4))
    buffers = persistent_buffers(model)
    assert buffers.keys() == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    state = {
        "learning_rate": 0.1 + 0.2,
        "data": {"epoch": 3, "files": ["a", "b"], "done": None, "on": True, "far": float("inf")},
        "random": {"cpu": torch.get_rng_state(), "streams": [torch.arange(6).view(2, 3).T]},
        "loss_scale": torch.tensor(65536.0),
    }
    store = make_store()
    path = save(store, tmp_path, 0, state, buffers=buffers)
    saved = {name: value.clone() for name, value in buffers.items()}
    model(torch.rand(8, 4))
    _, loaded = load_checkpoint(store, path, buffers=buffers)
    assert all(torch.equal(buffers[name], saved[name]) for name in saved)
    assert loaded.keys() == state.keys()
    assert loaded["learning_rate"] == state["learning_rate"]
    assert loaded["data"] == state["data"]
    assert torch.equal(loaded["random"]["cpu"], state["random"]["cpu"])
    assert torch.equal(loaded["random"]["streams"][0], state["random"]["streams"][0])
    assert torch.equal(loaded["loss_scale"], state["loss_scale"])


def test_weights_load_without_optimizer_state(tmp_path):
    trained, fresh = make_store(), make_store(optimizer=MOMENTUM)
    train(trained, 0)
    path = save(trained, tmp_path, 1, {"x": 1})
    assert load_checkpoint(fresh, path, weights_only=True) == (1, {"x": 1})
    ours, theirs = contents(trained), contents(fresh)
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)
    assert all(fresh.scalars.by_stage[stage.index] == [None] * len(stage.params) for stage in fresh.stages)


def test_weights_from_foreign_files(tmp_path):
    torch.manual_seed(0)
    values = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    halves = {name: value.bfloat16() for name, value in values.items()}
    safetensors.torch.save_file(halves, tmp_path / "model.safetensors")
    store = make_store(wire=torch.bfloat16)
    load_weights(store, tmp_path)
    found = contents(store)
    assert all(torch.equal(found[name], halves[name].float().view(-1)) for name in SHAPES)


def test_describe_returns_step_sizes_and_state(tmp_path):
    store = make_store()
    train(store, 0)
    path = save(store, tmp_path, 1, {"note": "x"})
    description = describe(path)
    assert (description.step, description.optimizer, description.state) == (1, "AdamW", {"note": "x"})
    assert description.num_parameters == sum(torch.Size(shape).numel() for shape in SHAPES.values())
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert description.num_bytes == sum(file.stat().st_size for file in files)


def test_keep_n_removes_older_checkpoints(tmp_path):
    store = make_store(stages=[["head.weight"]])
    manager = CheckpointManager(tmp_path, keep_n=2)
    assert manager.latest() is None
    for step in (5, 10, 100, 9):
        manager.save(store, step, {})
        manager.wait()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint_100", "checkpoint_9"}  # the latest save is kept
    assert manager.latest() == tmp_path / "checkpoint_100"
    with pytest.raises(ConfigError, match="expected keep_n >= 1, got 0"):
        CheckpointManager(tmp_path, keep_n=0)


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    store = make_store(stages=[["head.weight"]])
    save(store, tmp_path, 1, {"attempt": 1})
    train(store, 0)
    path = save(store, tmp_path, 1, {"attempt": 2})
    again = make_store(stages=[["head.weight"]])
    assert load_checkpoint(again, path) == (1, {"attempt": 2})
    assert_same(store, again)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
