"""Hugging Face GPT-2 checkpoints, compared with transformers in both directions."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats.gpt2 import GPT2
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.decoder import Decoder

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "max_position_embeddings": 16,
    "initializer": {"name": "normal", "std": 0.2},
}
VARIANTS = [
    {},
    {"share_embedding_weights": False},
    {"filter_size": 40, "nonlinearity": "gelu_new", "num_hidden_layers": 12, "layer_norm_epsilon": 1e-3},
    {"name": "gpt3", "nonlinearity": "relu", "attention_type": "dot_product", "num_heads": 1},
    {"nonlinearity": "silu", "share_embedding_weights": False, "num_hidden_layers": 1},
    {"nonlinearity": "tanh", "attention_dropout_rate": 0.3, "embedding_dropout_rate": 0.2},
]


def model_of(**changes):
    model = Decoder(DecoderConfig.model_validate({**SMALL, **changes})).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn(parameter.shape, generator=generator)
    return model


def tokens():
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
@pytest.mark.parametrize("changes", VARIANTS)
def test_transformers_loads_an_export_with_the_same_logits(tmp_path, changes, max_shard_bytes):
    model, out = model_of(**changes), tmp_path / "deep" / "out"
    export_hf(model.named_parameters(), model.config, out, max_shard_bytes=max_shard_bytes, end_of_text=60)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (max_shard_bytes == 20_000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.eos_token_id == 60
    with torch.no_grad():
        torch.testing.assert_close(
            theirs.eval()(tokens()).logits, model.logits(tokens()), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("changes", VARIANTS)
def test_import_of_an_export_has_the_same_bits(tmp_path, changes):
    model = model_of(**changes)
    export_hf(model.state_dict(), model.config, tmp_path / "out", max_shard_bytes=20_000)
    config, tensors = import_hf(tmp_path / "out")
    imported = dict(tensors)
    assert set(imported) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(imported[name], p) for name, p in model.named_parameters())
    for key in ("hidden_size", "ffn_size", "nonlinearity", "attention_dropout", "attention_type"):
        assert getattr(config, key) == getattr(model.config, key)


@pytest.mark.parametrize(("tied", "bare"), [(True, False), (True, True), (False, False)])
def test_imports_what_transformers_saves(tmp_path, tied, bare):
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=16, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    (theirs.transformer if bare else theirs).save_pretrained(tmp_path)
    config, tensors = import_hf(tmp_path)
    model = Decoder(config).eval()
    model.load_state_dict(dict(tensors), strict=not tied)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_causal_masks_of_old_checkpoints_are_skipped(tmp_path):
    model = model_of()
    export_hf(model.named_parameters(), model.config, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, file)
    _, imported = import_hf(tmp_path / "out")
    assert {name for name, _ in imported} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_export_in_half_precision(tmp_path, dtype):
    model = model_of()
    export_hf(model.named_parameters(), model.config, tmp_path / "out", dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == dtype
    assert torch.equal(theirs.transformer.wte.weight, model.embedding.weight.to(dtype))


def test_tokenizer_files_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    model = model_of()
    export_hf(
        model.named_parameters(),
        model.config,
        tmp_path / "out",
        tokenizer_files=[tmp_path / "tokenizer.json"],
    )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    model = model_of()
    parameters = dict(model.named_parameters())
    parameters["blocks.0.ffn.inptu.weight"] = parameters.pop("blocks.0.ffn.input.weight")
    with pytest.raises(CheckpointError, match=r"similar.*blocks\.0\.ffn\.input\.weight"):
        export_hf(parameters, model.config, tmp_path / "out")
    with pytest.raises(CheckpointError, match="the output folder cannot be written"):
        export_hf(
            model.named_parameters(), model.config, tmp_path / "out", tokenizer_files=[tmp_path / "absent"]
        )
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_a_folder_with_content_and_wrong_shapes(tmp_path):
    model = model_of()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        export_hf(model.named_parameters(), model.config, tmp_path)
    wider = model.config.model_copy(update={"vocab_size": 62})
    with pytest.raises(CheckpointError, match=r"shape \(62, 24\).*\(61, 24\)"):
        export_hf(model.named_parameters(), wider, tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bias_in_output": True},
        {"use_ffn_bias": False},
        {"nonlinearity": "swiglu"},
        {"embeddings_scale": 10.0},
        {"mup_base_hidden_size": 8, "mup_base_filter_size": 32},
    ],
)
def test_models_that_the_format_cannot_express_are_refused(changes):
    with pytest.raises(ConfigError, match="the format of GPT2LMHeadModel cannot express"):
        GPT2.config_to_hf(DecoderConfig.model_validate({**SMALL, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "mish"}, "nonlinearity"),
        ({"n_head": 5}, "multiple of num_heads"),
        ({"n_layer": "two"}, "n_layer"),
    ],
)
def test_import_refuses_unsupported_configs(changes, message):
    hf = {**transformers.GPT2Config().to_dict(), **changes}
    with pytest.raises(ConfigError, match=message):
        GPT2.config_from_hf(hf, where="config.json")


def test_config_defaults_equal_transformers():
    default = transformers.GPT2Config()
    config = GPT2.config_from_hf({"model_type": "gpt2"}, where="config.json")
    assert config == GPT2.config_from_hf(default.to_dict(), where="config.json")
    assert (config.hidden_size, config.num_hidden_layers) == (default.n_embd, default.n_layer)


def test_damaged_checkpoints_are_errors(tmp_path):
    model = model_of()
    out = tmp_path / "out"
    export_hf(model.named_parameters(), model.config, out)
    file = out / "model.safetensors"
    whole = file.read_bytes()

    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"lies outside of the file(.|\n)*model\.safetensors"):
        list(import_hf(out)[1])
    tensors = load(whole)
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing tensor: transformer\.ln_f\.bias"):
        list(import_hf(out)[1])
    tensors["transformer.ln_f.bias"] = torch.zeros(7)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"ln_f\.bias of shape \(24,\).*got \(7,\)"):
        list(import_hf(out)[1])
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        list(import_hf(out)[1])
    (out / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        import_hf(out)
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match="the folder does not exist"):
        import_hf(out)


def test_files_follow_the_safetensors_format(tmp_path):
    model = model_of()
    export_hf(model.named_parameters(), model.config, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        total += sum(tensor.nbytes for tensor in tensors.values())
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000 or len(tensors) == 1
    assert total == index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())


MUP = [
    {"embeddings_scale": 10.0, "output_logits_alpha": 2.2, "scale_qk_dot_by_d": True},
    {"embeddings_scale": 3.0, "output_logits_scale": 0.7, "share_embedding_weights": False},
    {"attention_logits_alpha": 1.7, "scale_qk_dot_by_layer_idx": True, "output_logits_alpha": 0.3},
]


def mup_model(**changes):
    return model_of(mup_base_hidden_size=12, mup_base_filter_size=48, **changes)


@pytest.mark.parametrize("changes", MUP)
def test_export_with_mup_has_the_same_logits_in_transformers_and_reimported(tmp_path, changes):
    model, out = mup_model(**changes), tmp_path / "out"
    export_hf(model.named_parameters(), model.config, out)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config, tensors = import_hf(out)
    again = Decoder(config).eval()
    again.load_state_dict(dict(tensors))
    with torch.no_grad():
        expected = model.logits(tokens())
        torch.testing.assert_close(theirs.eval()(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again.logits(tokens()), expected, rtol=1e-5, atol=1e-5)


def test_factors_of_mup_that_are_powers_of_two_keep_every_bit(tmp_path):
    model = model_of(
        num_heads=6, embeddings_scale=8.0, output_logits_scale=0.25, scale_qk_dot_by_d=True
    )  # heads of 4 elements
    export_hf(model.named_parameters(), model.config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    ours = dict(model.named_parameters())
    assert torch.equal(stored["transformer.wte.weight"] / 8, ours["embedding.weight"])
    assert torch.equal(stored["lm_head.weight"] * 4, ours["embedding.weight"])
    query, rest = stored["transformer.h.0.attn.c_attn.weight"].t().split([24, 48])
    assert torch.equal(query * 2, ours["blocks.0.attention.qkv.weight"][:24])
    assert torch.equal(rest, ours["blocks.0.attention.qkv.weight"][24:])


def test_plain_converter_error_names_the_mup_key_and_converter(tmp_path):
    model = model_of(embeddings_scale=8.0)
    with pytest.raises(ConfigError, match="embeddings_scale: 8") as error:
        export_hf(model.named_parameters(), model.config, tmp_path / "out", format=GPT2)
    assert "--model gpt2-mup" in error.value.remedy
