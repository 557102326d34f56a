"""Imports and saves of models of transformers have the bits that transformers loads, also after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from library_runs import SHARD_BYTES, import_library, make_model, save_streamed
from transformers import AutoModelForCausalLM

from headwater.cli.main import main
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.trainer.pretrained import checkpoint_weights

SCRIPT = Path(__file__).with_name("library_runs.py")


def _loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", ["5GB", SHARD_BYTES], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_import_has_the_bits_that_transformers_loads(tmp_path, dtype, shard_bytes, tied):
    model = make_model(0, tied=tied).to(dtype)
    model.save_pretrained(tmp_path / "library", max_shard_size=shard_bytes)
    assert len(list((tmp_path / "library").glob("model*.safetensors"))) > 1 or shard_bytes == "5GB"
    assert import_library(tmp_path) == 0
    saved = SavedCheckpoint(tmp_path / "run" / "checkpoint_0")
    saved.verify()
    # Untrained: there is the place of an optimizer state, and nothing in it.
    assert all(entry.scalars is None and entry.states for entry in saved.manifest.params.values())
    for stage in saved.manifest.stages:
        states = saved.tensors(stage.optimizer_file)
        assert not any(states.read_whole(name).any() for name in states.places)
    # Named by this project; the export gives the library's names back.
    weights = dict(checkpoint_weights(saved.folder))
    assert all(value.dtype == torch.float32 for value in weights.values())
    exported = tmp_path / "exported"
    assert main(["checkpoint", "export", "--model_dir", str(tmp_path / "run"), "--out", str(exported)]) == 0
    _assert_same(_loaded(exported, dtype=torch.float32), _loaded(tmp_path / "library", dtype=torch.float32))


def _killed(work, folder, kind, number):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), work, str(folder), kind, str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kill_at", [1, 9, 20])
def test_a_killed_import_leaves_no_run_and_the_next_one_works(tmp_path, kill_at):
    make_model(0).save_pretrained(tmp_path / "library")
    _killed("import", tmp_path, "write", kill_at)
    run = tmp_path / "run"
    assert (run / "checkpoint_0.partial").is_dir()
    assert not (run / "checkpoint_0").exists() and not list(run.glob("params*"))
    assert import_library(tmp_path) == 0
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"checkpoint_0"}
    exported = tmp_path / "exported"
    assert main(["checkpoint", "export", "--model_dir", str(run), "--out", str(exported)]) == 0
    _assert_same(_loaded(exported), _loaded(tmp_path / "library"))


@pytest.mark.parametrize("kill_at", [1, 7])
def test_a_kill_while_a_save_is_written_leaves_the_save_before(tmp_path, kill_at):
    save_streamed(0, tmp_path)
    _killed("save", tmp_path, "write", kill_at)
    saved = tmp_path / "saved"
    _assert_same(_loaded(saved), make_model(0).state_dict())
    assert list(saved.glob(".saving-*"))
    save_streamed(1, tmp_path)
    _assert_same(_loaded(saved), make_model(1).state_dict())
    assert not list(saved.glob(".saving-*")), "what the killed process left is removed"


@pytest.mark.parametrize("kill_at", [1, 3, 5])
def test_a_kill_among_the_renames_of_shards_never_gives_a_mixture_of_two_saves(tmp_path, kill_at):
    save_streamed(0, tmp_path)
    saved = tmp_path / "saved"
    assert len(list(saved.glob("model-*.safetensors"))) > 3
    _killed("save", tmp_path, "rename", kill_at)
    with pytest.raises(OSError, match="no file named"):
        _loaded(saved)
    save_streamed(1, tmp_path)
    _assert_same(_loaded(saved), make_model(1).state_dict())
    assert not list(saved.glob(".saving-*"))
