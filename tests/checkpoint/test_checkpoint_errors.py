"""Errors in a checkpoint are reported with file and tensor name, and no earlier checkpoint is lost."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_runs import ADAMW, MOMENTUM, SHAPES, assert_same, contents, load_checkpoint, make_store, train

from headwater.core.errors import (
    CheckpointError,
    CorruptError,
    DiskFullError,
    HeadwaterError,
    ModelDirBusyError,
    StoreError,
)
from headwater.optim.spec import OptimizerSpec
from headwater.store.checkpoint_folder import publish, recover, retire
from headwater.store.snapshot_load import SavedCheckpoint, load_weights
from headwater.store.snapshot_manifest import FORMAT_VERSION
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.checkpoint_inspection import describe, find_damage
from headwater.trainer.model_dir_lock import ModelDirLock


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Write a complete checkpoint; tests damage copies of it."""
    model_dir = tmp_path_factory.mktemp("run")
    store = make_store()
    train(store, 0)
    manager = CheckpointManager(model_dir)
    path = manager.save(store, 1, {"random": torch.arange(4)})
    manager.wait()
    return path


@pytest.fixture
def checkpoint(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoint_1"))


def load(path: Path, store=None, **options):
    return load_checkpoint(store or make_store(), path, **options)


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load(tmp_path / "checkpoint_9")


def test_a_checkpoint_without_a_manifest_is_refused(checkpoint):
    (checkpoint / "manifest.json").unlink()
    assert CheckpointManager(checkpoint.parent).latest() is None
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load(checkpoint)


def test_newer_version(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["format_version"] = FORMAT_VERSION + 1
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"format version {FORMAT_VERSION + 1}"):
        load(checkpoint)


@pytest.mark.parametrize("file", ["weights_0001.safetensors", "optimizer_0002.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "too long"])
def test_file_of_another_length(checkpoint, file, damage):
    path = checkpoint / file
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "truncated" else data + b"x")
    with pytest.raises(CheckpointError if damage == "missing" else CorruptError, match=damage) as raised:
        load(checkpoint)
    assert raised.value.where == str(path)


@pytest.mark.parametrize(
    ("file", "where", "named"),
    [
        ("weights_0000.safetensors", -1, "tensor embed.scale"),
        ("weights_0001.safetensors", -161, "tensor block.0.weight"),
        ("weights_0001.safetensors", 40, "the header"),
        ("weights_0001.safetensors", 0, "the header"),
        ("optimizer_0003.safetensors", -1, "tensor head.weight/exp_avg_sq"),
        ("weights_buffers.safetensors", 9, "the header"),
        ("trainer.safetensors", -1, "trainer.safetensors"),
    ],
)
def test_flipped_byte(checkpoint, file, where, named):
    flip_byte(checkpoint / file, where)
    with pytest.raises(CorruptError, match=f"{named}: bytes") as raised:
        load(checkpoint)
    assert raised.value.where == str(checkpoint / file)


def test_flipped_bytes_of_the_manifest_are_found(checkpoint):
    path = checkpoint / "manifest.json"
    good = path.read_bytes()
    for offset in [*range(100), *range(100, len(good), 31)]:
        flip_byte(path, offset)
        with pytest.raises(HeadwaterError):
            SavedCheckpoint(checkpoint)
        path.write_bytes(good)


def test_verify_names_the_tensor_with_a_changed_byte(checkpoint):
    SavedCheckpoint(checkpoint).verify()
    flip_byte(checkpoint / "optimizer_0001.safetensors", -3)
    with pytest.raises(CorruptError, match=r"tensor block.0.weight/exp_avg_sq"):
        SavedCheckpoint(checkpoint).verify()


def other_model(changes: dict[str, tuple[int, ...] | None]):
    shapes = {name: shape for name, shape in {**SHAPES, **changes}.items() if shape is not None}
    return make_store(shapes=shapes, stages=[list(shapes)])


def test_a_parameter_of_another_shape_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match=r"head.weight has shape \(7, 3\) in the file and \(3, 7\)"):
        load(checkpoint, other_model({"head.weight": (3, 7)}))


def test_missing_parameter(checkpoint):
    store = other_model({"block.2.bias": (40,)})
    before = contents(store)
    with pytest.raises(CheckpointError, match=r"block.2.bias is missing; the files hold block.1.bias"):
        load(checkpoint, store)
    after = contents(store)
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)  # nothing was changed
    load(checkpoint, store, strict=False)
    loose, exact = contents(store), make_store()
    load(checkpoint, exact)
    assert torch.equal(loose["block.2.bias"], before["block.2.bias"])
    for name, value in contents(exact).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loose[name], value), name


def test_unknown_parameter(checkpoint):
    store = other_model({"block.1.bias": None})
    with pytest.raises(CheckpointError, match=r"the model has no block.1.bias; it has block.0.bias"):
        load(checkpoint, store)
    load(checkpoint, store, strict=False)


def test_a_checkpoint_of_another_optimizer_is_refused(checkpoint):
    store = make_store(optimizer=MOMENTUM)
    with pytest.raises(CheckpointError, match="the optimizer AdamW, but this run has SGD"):
        load(checkpoint, store)
    load(checkpoint, store, weights_only=True)


def test_other_optimizer_state(checkpoint):
    amsgrad = OptimizerSpec("AdamW", {**ADAMW.kwargs, "amsgrad": True})
    with pytest.raises(CheckpointError, match=r"optimizer state of embed.weight .* max_exp_avg_sq"):
        load(checkpoint, make_store(optimizer=amsgrad))


def test_buffers_must_match(checkpoint):
    with pytest.raises(CheckpointError, match=r"norm.mean is missing"):
        load(checkpoint, buffers={"norm.mean": torch.zeros(2)})


def test_manifest_names_only_its_own_files(checkpoint):
    """A forged manifest cannot make the reader open a file outside of the checkpoint."""
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text())
    document["content"]["files"]["../x.safetensors"] = {"num_bytes": 0, "chunks": []}
    canonical = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["checksum"] = zlib.crc32(canonical)
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match="not the checkpoint's own"):
        SavedCheckpoint(checkpoint)


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


ONE_TENSOR = '{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,16]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04pickle",
        b"\xff" * 64,
        header("[]"),
        header(ONE_TENSOR % 4),
        header(ONE_TENSOR % 9) + b"0" * 16,
    ],
    ids=["empty", "pickle", "noise", "no mapping", "tensor beyond the end", "shape and bytes differ"],
)
def test_foreign_file_that_is_not_safetensors(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_weights(make_store(), path)


def test_folders_without_valid_weights_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        load_weights(make_store(), tmp_path)
    values = {name: torch.ones(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    safetensors.torch.save_file(values, tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(values, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"embed.weight is torch.int64 in the file"):
        load_weights(make_store(), tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[" * 100_000,
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"embed.weight": 5}}',
        '{"weight_map": {"embed.weight": "../part.safetensors"}}',
        json.dumps({"weight_map": {"embed.weight": "long" * 100}}),
    ],
    ids=["no JSON", "deep", "no names", "no files", "number", "outside", "long name"],
)
def test_damaged_index_of_a_folder(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(CheckpointError, match="index cannot be read") as raised:
        load_weights(make_store(), tmp_path)
    assert raised.value.where == str(path)


def test_index_that_the_system_cannot_read(tmp_path):
    (tmp_path / "model.safetensors.index.json").mkdir()
    with pytest.raises(StoreError, match=r"Is a directory(.|\n)*index\.json"):
        load_weights(make_store(), tmp_path)


def test_empty_list_of_files():
    with pytest.raises(CheckpointError, match="at least one safetensors file, got an empty list"):
        load_weights(make_store(), [])


# full disks


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """Limit the size of every file to `num_bytes`, which the writer sees as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [100, 3000, 10_000])
def test_full_disk(tmp_path, num_bytes):
    store = make_store()
    manager = CheckpointManager(tmp_path)
    first = manager.save(store, 1, {})
    manager.wait()
    train(store, 0)
    with largest_file(num_bytes), pytest.raises(DiskFullError, match="no space left"):
        manager.save(store, 2, {})
        manager.wait()
    assert list(tmp_path.iterdir()) == [first]
    load(first)
    manager.save(store, 3, {})
    manager.wait()
    assert manager.latest() == tmp_path / "checkpoint_3"


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mounting = [mount, "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_really_full_disk(small_disk):
    store = make_store(stages=[["block.0.weight", "block.0.bias"], ["block.1.weight", "block.1.bias"]])
    manager = CheckpointManager(small_disk)
    with pytest.raises(DiskFullError, match="no space left"):
        for step in range(9):
            train(store, step)
            manager.save(store, step, {})
            manager.wait()
    kept = manager.latest()
    assert kept is not None
    assert not list(small_disk.glob("*.partial"))
    SavedCheckpoint(kept).verify()


# files that a killed run leaves


def test_partial_and_replaced_checkpoints_are_removed(checkpoint):
    model_dir = checkpoint.parent
    partial = Path(shutil.copytree(checkpoint, model_dir / "checkpoint_2.partial"))
    replaced = Path(shutil.copytree(checkpoint, model_dir / "checkpoint_1.replaced"))
    assert CheckpointManager(model_dir).latest() == checkpoint
    with ModelDirLock(model_dir):
        assert not partial.exists()
        assert not replaced.exists()
    assert describe(checkpoint).step == 1


def test_kill_while_one_checkpoint_replaces_another(checkpoint):
    """Between the two renames no folder has the name of the checkpoint; the older one is renamed back."""
    model_dir = checkpoint.parent
    Path(shutil.copytree(checkpoint, model_dir / "checkpoint_1.partial"))
    checkpoint.rename(model_dir / "checkpoint_1.replaced")
    recover(model_dir)
    assert [path.name for path in model_dir.iterdir()] == ["checkpoint_1"]
    SavedCheckpoint(checkpoint).verify()


def test_publish_replaces_a_checkpoint_and_retire_removes_it(checkpoint):
    model_dir = checkpoint.parent
    partial = Path(shutil.copytree(checkpoint, model_dir / "checkpoint_1.partial"))
    (partial / "new").touch()
    publish(partial, checkpoint)
    assert [path.name for path in model_dir.iterdir()] == ["checkpoint_1"]
    assert (checkpoint / "new").exists()
    retire(checkpoint)
    assert list(model_dir.iterdir()) == []


# one run in a model_dir


def test_second_run_is_refused(tmp_path):
    with ModelDirLock(tmp_path / "run"):
        with pytest.raises(ModelDirBusyError, match=f"process {os.getpid()} on ") as raised:
            ModelDirLock(tmp_path / "run").__enter__()
        assert raised.value.where == str(tmp_path / "run")
    with ModelDirLock(tmp_path / "run"):
        pass


def test_lock_ends_with_its_process(tmp_path):
    script = (
        "import sys; from pathlib import Path; from headwater.trainer.model_dir_lock import ModelDirLock\n"
        "ModelDirLock(Path(sys.argv[1])).__enter__(); print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ModelDirBusyError, match=f"process {other.pid} on "):
            ModelDirLock(tmp_path).__enter__()
        other.kill()
    with ModelDirLock(tmp_path):
        pass


def test_a_failed_run_removes_the_folder_that_it_has_made_unless_something_is_in_it(tmp_path):
    for folder, is_kept in ((tmp_path / "new", False), (tmp_path / "old", True), (tmp_path / "used", True)):
        if folder.name == "old":
            folder.mkdir()
        with pytest.raises(KeyError), ModelDirLock(folder):
            if folder.name == "used":
                (folder / "plan.txt").touch()
            raise KeyError
        assert folder.exists() == is_kept
    with ModelDirLock(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / "run.lock").exists()


def test_a_lock_whose_file_was_removed_before_it_was_taken_is_taken_again(tmp_path, monkeypatch):
    """A failed run may remove the folder between the moments when another run opens and locks the file."""
    take, folder = ModelDirLock._take, tmp_path / "run"

    def late(self):
        if not removed:
            shutil.rmtree(folder)
            removed.append(True)
        take(self)

    removed: list[bool] = []
    monkeypatch.setattr(ModelDirLock, "_take", late)
    with ModelDirLock(folder), pytest.raises(ModelDirBusyError):
        ModelDirLock(folder).__enter__()


def test_damaged_checkpoint_leaves_the_older_one_usable(tmp_path):
    store = make_store()
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        train(store, step)
        manager.save(store, step, {})
    manager.wait()
    reference = make_store()
    load(tmp_path / "checkpoint_1", reference)
    flip_byte(tmp_path / "checkpoint_2" / "weights_0003.safetensors", -1)
    fresh = make_store()
    with pytest.raises(CorruptError):
        load(tmp_path / "checkpoint_2", fresh)
    load(tmp_path / "checkpoint_1", fresh)
    assert_same(fresh, reference)


# forged manifests with a right checksum


def forge(checkpoint: Path, change) -> None:
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    canonical = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["checksum"] = zlib.crc32(canonical)
    path.write_text(json.dumps(document))


def without(file: str):
    return lambda document: document["content"]["files"].pop(file)


def scalar_of_unknown_dtype(document):
    document["content"]["stages"][0]["params"][0]["scalars"] = {"step": {"dtype": "F9", "value": 1}}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without("trainer.json"), "does not list trainer.json"),
        (without("trainer.safetensors"), "does not list trainer.safetensors"),
        (without("weights_buffers.safetensors"), "does not list weights_buffers.safetensors"),
        (lambda document: document.update(format_version=True), "format version is True"),
        (scalar_of_unknown_dtype, "optimizer state of embed.weight cannot be read"),
    ],
)
def test_a_forged_manifest_is_refused(checkpoint, change, what):
    forge(checkpoint, change)
    with pytest.raises(CorruptError, match=what):
        load(checkpoint)


def test_a_deeply_nested_manifest_is_refused(checkpoint):
    (checkpoint / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(CorruptError, match="manifest is damaged"):
        load(checkpoint)
    assert find_damage(checkpoint) is not None


@pytest.mark.parametrize("state", [b"[]", b'{"a": {"__tensor__": "none"}}', b"[" * 200_000, b'{"a": \xff}'])
def test_an_invalid_run_state_is_refused(checkpoint, state):
    (checkpoint / "trainer.json").write_bytes(state)

    def describe_state(document):
        chunks = [[0, len(state), zlib.crc32(state)]]
        document["content"]["files"]["trainer.json"] = {"num_bytes": len(state), "chunks": chunks}

    forge(checkpoint, describe_state)
    with pytest.raises(CorruptError, match="state of the run"):
        load(checkpoint)


def test_newest_whole_skips_damaged_checkpoints(checkpoint, caplog):
    model_dir = checkpoint.parent
    shutil.copytree(checkpoint, model_dir / "checkpoint_7")
    manager = CheckpointManager(model_dir)
    assert manager.newest_whole() == checkpoint
    assert "its manifest says step 1" in caplog.text
    (checkpoint / "weights_0001.safetensors").unlink()
    with pytest.raises(CorruptError, match="every checkpoint of this run is damaged"):
        manager.newest_whole()
    assert CheckpointManager(model_dir / "none").newest_whole() is None
