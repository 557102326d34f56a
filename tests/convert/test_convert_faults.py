"""Folders that the converter cannot use: malformed values, damaged files, unwritable places."""

import json

import pytest
import torch
from benchmarks.fuzz_converter import folders, run

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.folder import write_folder
from headwater.convert.stored import stored_tensors
from headwater.core.errors import CheckpointError, ConfigError, HeadwaterError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return {path.name: path for path in folders(tmp_path_factory.mktemp("sound"))}


@pytest.mark.parametrize(
    "content",
    [
        *("3", "[]", "null", '"x"', "", "{", "[" * 100_000, "\x00"),
        json.dumps({"model_type": ["gpt2"]}),
        json.dumps({"model_type": "gpt2", "architectures": 3}),
        json.dumps({"model_type": "gpt2", "architectures": "GPT2LMHeadModel"}),
        json.dumps({"model_type": "gpt2", "vocab_size": 1e30}),
        json.dumps({"model_type": "gpt2", "n_layer": 10**9}),
        json.dumps({"model_type": "llama", "rope_scaling": [3]}),
        json.dumps({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}),
        json.dumps({"model_type": "bert", "id2label": 7, "architectures": ["BertForTokenClassification"]}),
        '{"model_type": "gpt2", "vocab_size": ' + "9" * 5000 + "}",
    ],
    ids=range(17),
)
def test_malformed_config_raises_a_project_error(content, sound, tmp_path):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes((sound["gpt2"] / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError) as caught:
        dict(import_hf(tmp_path)[1])
    assert "config.json" in caught.value.where


def test_damaged_folders_raise_project_errors():
    ended, bad = run(seed=1, count=200)
    assert not bad
    assert set(ended) == {"a model", "ConfigError", "CheckpointError"}


def test_export_to_an_unwritable_place_raises(sound, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config, tensors = import_hf(sound["gpt2"])
    tensors = dict(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for out in (tmp_path / "file/out", tmp_path / "file"):
        with pytest.raises(CheckpointError):
            export_hf(tensors, config, out)
        with pytest.raises(CheckpointError):
            write_folder(tensors.items(), shapes, config, out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_index_with_a_file_outside_of_the_folder_is_refused(sound, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_bytes((sound["gpt2"] / "config.json").read_bytes())
    (tmp_path / "secret.safetensors").write_bytes((sound["gpt2"] / "model.safetensors").read_bytes())
    index = {"weight_map": {"transformer.wte.weight": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HeadwaterError, match="expected names of files in the folder"):
        dict(import_hf(folder)[1])


def test_pickled_weights_are_read_without_running_code(sound, tmp_path):
    config, tensors = import_hf(sound["gpt2"])
    (tmp_path / "config.json").write_bytes((sound["gpt2"] / "config.json").read_bytes())
    stored = {each.name: each.read() for each in stored_tensors(sound["gpt2"])}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    same_config, same = import_hf(tmp_path)
    assert same_config == config
    for (name, tensor), (other_name, other) in zip(tensors, same, strict=True):
        assert name == other_name
        assert torch.equal(tensor, other)


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit('this code must not run')",))


def test_pickle_with_code_is_refused(sound, tmp_path):
    (tmp_path / "config.json").write_bytes((sound["gpt2"] / "config.json").read_bytes())
    torch.save({"transformer.wte.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="such a pickle can run any code"):
        dict(import_hf(tmp_path)[1])
