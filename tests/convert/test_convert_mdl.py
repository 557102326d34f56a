"""Checkpoints of Cerebras' software, compared with the logits of the Model Zoo's own classes."""

import json
import logging
import lzma
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from safetensors.torch import load_file

import headwater
from headwater.cli.main import main
from headwater.config.models import AnyModel
from headwater.convert.model_zoo import zoo_readers
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.lazy import LazyTensor
from headwater.core.mdl import read_mdl
from headwater.models.registry import build_model

h5py = pytest.importorskip("h5py")
pytest.importorskip("hdf5plugin")

FILES = Path(__file__).parent / "mdl"
BASE = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "num_heads": 4, "filter_size": 32,
    "max_position_embeddings": 8, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
ROTARY = {
    "position_embedding_type": "rotary", "rotary_dim": 4, "norm_type": "rmsnorm", "use_ffn_bias": False,
    "use_projection_bias_in_attention": False, "use_ffn_bias_in_attention": False,
    "share_embedding_weights": False,
}  # fmt: skip
MODELS = {
    "gpt2": {"name": "gpt2", "num_hidden_layers": 2, "nonlinearity": "gelu"},
    "llama": {
        **ROTARY, "name": "llama", "num_hidden_layers": 2, "rotary_dim": 6, "nonlinearity": "swiglu",
        "attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": 2},
    },
    "mixtral": {
        **ROTARY, "name": "mixtral", "nonlinearity": "swiglu",
        "moe": {"num_experts": 4, "top_k": 2, "num_shared_experts": 1},
    },
    "gemma2": {
        **ROTARY, "name": "gemma2", "num_hidden_layers": 2, "nonlinearity": "geglu",
        "share_embedding_weights": True, "norm_first_sandwich": True, "final_logit_softcapping": 30.0,
        "attention_logit_softcapping": 50.0, "embeddings_scale": 4.0, "layer_norm_epsilon": 1e-6,
    },
    "bloom": {
        "name": "bloom", "position_embedding_type": "alibi", "embedding_layer_norm": True,
        "nonlinearity": "gelu",
    },
    "slopes": {
        "name": "bloom", "position_embedding_type": "alibi", "embedding_layer_norm": False,
        "alibi_trainable_slopes": True, "use_bias_in_output": True, "nonlinearity": "gelu",
    },
    "gptj": {"name": "gptj", "rotary_dim": 4, "nonlinearity": "gelu"},
    "gpt-neox": {"name": "gpt-neox", "rotary_dim": 4, "nonlinearity": "gelu"},
    "bert": {"name": "bert", "encoder_nonlinearity": "gelu"},
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    def unpacked(name):
        path = tmp_path / f"{name}.mdl"
        path.write_bytes(lzma.decompress((FILES / f"{name}.mdl.xz").read_bytes()))
        return path

    return unpacked


@pytest.fixture
def params(tmp_path):
    def written(name, **changes):
        path = tmp_path / f"{name}.yaml"
        section = {**BASE, **MODELS[name], **changes}
        path.write_text(yaml.safe_dump({"trainer": {"init": {"model": section}}}))
        return path

    return written


def config_of(name, **changes):
    return TypeAdapter(AnyModel).validate_python({**BASE, **MODELS[name], **changes})


def model_of(path, config):
    """The model with the weights of a file."""
    model = build_model(config).eval()
    weights = weights_of(path, config)
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)
    return model


def weights_of(path, config):
    return {name: read() for name, read in zoo_readers(path, config).items()}


def expected_of(name):
    found = load_file(FILES / "expected.safetensors")
    return found[f"{name}.input_ids"].long(), found[f"{name}.logits"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_a_model_computes_the_logits_of_the_model_zoos_own_class(file, name):
    model = model_of(file(name), config_of(name))
    tokens, logits = expected_of(name)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), logits, rtol=1e-5, atol=2e-5)


def test_bert_computes_the_logits_of_the_model_zoos_own_class(file):
    found = load_file(FILES / "expected.safetensors")
    batch = {key: found[f"bert.{key}"].long() for key in ("input_ids", "token_type_ids", "attention_mask")}
    model = model_of(file("bert"), config_of("bert"))
    text = batch["attention_mask"] > 0  # the hidden states of padding are of no use
    with torch.no_grad():
        logits = model.logits(batch)
    torch.testing.assert_close(logits[text], found["bert.logits"][text], rtol=1e-5, atol=2e-5)


def test_files_of_both_layouts_hold_the_same_weights(file):
    new, old = (weights_of(file(name), config_of("gpt2")) for name in ("gpt2", "old"))
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in new)


def test_load_returns_the_nested_state_without_pickled_objects(file, caplog):
    with caplog.at_level(logging.WARNING):
        state = headwater.load(file("gpt2"))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["object"]
    assert state.keys() == {"model", "optimizer", "global_step", "half", "trainer"}
    assert state["trainer"] == {"name": "run", "seed": None, "flag": True}
    assert state["global_step"].item() == 7
    assert state["half"].dtype == torch.bfloat16 and state["half"].tolist() == [1.5, -2.0]
    assert state["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]
    assert state["optimizer"]["state"][0]["exp_avg"].tolist() == [1.0, 1.0, 1.0]
    weights = state["model"]
    assert (
        weights["model.lm_head.weight"].data_ptr()
        == weights["model.embedding_layer.word_embeddings.weight"].data_ptr()
    )


def test_large_tensors_are_lazy_and_have_the_same_values(file, monkeypatch):
    weights = headwater.load(file("gpt2"))["model"]
    monkeypatch.setattr("headwater.api.files._READ_AT_ONCE_BYTES", 0)
    lazy = headwater.load(file("gpt2"))["model"]
    assert all(isinstance(tensor, LazyTensor) for tensor in lazy.values())
    assert all(torch.equal(lazy[name].clone(), weights[name]) for name in weights)


def test_load_reads_all_kinds_of_values_of_the_older_layout(file):
    state = headwater.load(file("old"))
    new = headwater.load(file("gpt2"))["model"]
    assert state["model"].keys() == new.keys()
    assert all(torch.equal(state["model"][name], new[name]) for name in new)
    assert (state["note"], state["nothing"], state["optimizer"]) == ("abc", None, {"state.lr": 0.5})
    assert state["half"].dtype == torch.bfloat16 and state["half"].tolist() == [1.5, -2.0]
    assert torch.equal(state["filled"], torch.full((2, 3), 4.0))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_reads_a_converted_file_with_the_same_logits(file, params, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = ["--model", name, "--src-fmt", "cs-2.2", "--tgt-fmt", "hf", "--config", str(params(name))]
    assert main(["checkpoint", "convert", *options, str(file(name)), str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens, logits = expected_of(name)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-5, atol=2e-5)


def test_a_run_starts_from_an_imported_file(file, params, tmp_path, capsys):
    source = file("gpt2")
    run = tmp_path / "run"
    assert (
        main(["checkpoint", "import", str(source), "--params", str(params("gpt2")), "--model_dir", str(run)])
        == 0
    )
    assert main(["checkpoint", "convert", "--model", "gpt2", "--src-fmt", "cs-2.2", "--tgt-fmt", "headwater",
                 "--config", str(params("gpt2")), str(source), str(tmp_path / "own")]) == 0  # fmt: skip
    capsys.readouterr()
    assert main(["checkpoint", "diff", str(run), str(tmp_path / "own")]) == 0
    assert "the same, bit for bit" in capsys.readouterr().out
    assert main(["checkpoint", "info", str(source)]) == 0
    assert "gpt2.mdl" in capsys.readouterr().out


# faults


def test_a_model_that_is_not_that_of_the_file_is_refused(file):
    source = file("gpt2")
    with pytest.raises(CheckpointError, match=r"layers\.2\.") as error:
        zoo_readers(source, config_of("gpt2", num_hidden_layers=3))
    assert "missing" in error.value.what
    with pytest.raises(CheckpointError, match=r"layers\.1\..* does not belong to this model"):
        zoo_readers(source, config_of("gpt2", num_hidden_layers=1))
    readers = zoo_readers(source, config_of("gpt2", filter_size=40))
    with pytest.raises(CheckpointError, match=r"expected tensor .* of shape \(40, 24\)"):
        readers["blocks.0.ffn.input.weight"]()


def test_tensors_are_read_from_the_opened_file_after_another_one_has_its_name(file):
    path = file("gpt2")
    tensor = read_mdl(path).tensors["model.model.ln_f.weight"]
    path.unlink()
    path.write_bytes(b"another file")
    assert tensor.read().shape == (24,)


def test_a_head_that_differs_from_the_embedding_is_not_dropped(file):
    path = file("gpt-neox")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        zoo_readers(path, config_of("gpt-neox", share_embedding_weights=True))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"attention_sliding_window_length": 4, "sliding_window_every_other_decoder_layer": True}),
        ("bloom", {"embeddings_scale": 2.0}),
        ("bloom", {"pos_scaling_factor": 2.0}),
        ("mixtral", {"moe": {"num_experts": 4, "top_k": 1, "num_shared_experts": 1}}),
        ("gpt2", {"position_embedding_type": "fixed"}),
        ("gpt2", {"attention_sink_tokens": 2}),
    ],
)
def test_settings_with_another_meaning_in_the_model_zoo_are_refused(file, name, changes):
    with pytest.raises(ConfigError, match="computes another function"):
        zoo_readers(file(name), config_of(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma2", {"layer_norm_epsilon": None}, "no layer_norm_epsilon: the Model Zoo uses 1e-05"),
        ("llama", {"rotary_dim": None}, "no rotary_dim: the Model Zoo uses 1 then, and Headwater 6"),
        ("bloom", {"nonlinearity": None}, "no nonlinearity: the Model Zoo uses gelu"),
    ],
)
def test_a_key_whose_default_differs_must_be_written(name, changes, expected, tmp_path, file, capsys):
    section = {key: each for key, each in {**BASE, **MODELS[name], **changes}.items() if each is not None}
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump({"trainer": {"init": {"model": section}}}))
    words = ["checkpoint", "import", str(file(name)), "--params", str(params), "--model_dir"]
    assert main([*words, str(tmp_path / "run")])
    assert expected in " ".join(capsys.readouterr().err.split())


def test_slopes_of_another_number_of_heads_are_refused(file):
    with pytest.raises(CheckpointError, match="slopes of ALiBi for 4 heads"):
        zoo_readers(file("bloom"), config_of("bloom", num_heads=8))


def test_slopes_that_a_model_would_ignore_are_refused(file):
    constant = config_of("slopes", alibi_trainable_slopes=False)
    with pytest.raises(CheckpointError, match="slopes of ALiBi") as error:
        zoo_readers(file("slopes"), constant)
    assert "alibi_trainable_slopes" in error.value.remedy


def test_a_model_without_known_names_is_refused(file):
    config = TypeAdapter(AnyModel).validate_python({"name": "t5", "d_model": 24, "num_heads": 4})
    with pytest.raises(CheckpointError, match="no counterpart"):
        zoo_readers(file("gpt2"), config)


@pytest.mark.parametrize("name", ["gpt2", "old"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(file, name, kept):
    path = file(name)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        headwater.load(path)
    assert error.value.where == str(path)


def test_a_file_that_is_not_complete_is_refused(file):
    path = file("gpt2")
    with h5py.File(path, "a") as opened:
        del opened.attrs["__SUCCESS__"]
    with pytest.raises(CheckpointError, match="incomplete"):
        read_mdl(path)


def test_a_file_of_a_newer_format_is_refused(file):
    path = file("gpt2")
    with h5py.File(path, "a") as opened:
        opened.attrs["__version__"] = 0.6
    with pytest.raises(CheckpointError, match=r"format 0\.6"):
        read_mdl(path)


def test_another_hdf5_file_is_refused(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as opened:
        opened["data"] = [1, 2]
    with pytest.raises(CheckpointError, match="not a checkpoint of Cerebras' software"):
        headwater.load(path)


@pytest.mark.parametrize(
    "damage", ["[", '{"a": 1}', json.dumps({"model.x.__metadata__": {"__NUMPY__": True}})]
)
def test_damaged_metadata_are_refused(file, damage):
    path = file("gpt2")
    with h5py.File(path, "a") as opened:
        opened.attrs["model.x.__metadata__" if "NUMPY" in damage else "__spec__"] = damage
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_mdl(path)


@pytest.mark.parametrize("missing", ["h5py", "hdf5plugin"])
def test_without_the_packages_the_error_says_what_to_install(file, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=missing) as error:
        headwater.load(file("gpt2"))
    assert "headwater[mdl]" in error.value.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--src-fmt", "hf", "--tgt-fmt", "headwater"], "not a checkpoint in Hugging Face's format"),
        (["--src-fmt", "cs-2.2", "--tgt-fmt", "hf"], "does not contain the description of its model"),
    ],
)
def test_wrong_options_of_a_conversion_are_refused(file, tmp_path, capsys, options, message):
    code = main(
        ["checkpoint", "convert", "--model", "gpt2", *options, str(file("gpt2")), str(tmp_path / "o")]
    )
    assert code and message in capsys.readouterr().err


def test_an_import_without_params_is_refused(file, tmp_path, capsys):
    assert main(["checkpoint", "import", str(file("gpt2")), "--model_dir", str(tmp_path / "run")])
    assert "--params" in capsys.readouterr().err
