"""Decoders compared with transformers: logits, losses after a training step, and bit-exact round trips."""

import json

import pytest
import torch
from conversions import losses_of_a_step, stored
from safetensors.torch import load_file

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats import CONVERTERS, FORMATS
from headwater.convert.formats.base import REQUIRED
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.decoder import Decoder
from headwater.models.sequences import Piece

transformers = pytest.importorskip("transformers")

FOREIGN = {"btlm", "jais"}
"""Types of models that transformers does not have; test_convert_jais.py compares them with their formulas."""

DECODERS = [
    format for format in FORMATS if format.schema is DecoderConfig and format.model_type not in FOREIGN
]
_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_N_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}
_GATED = {**_SIZES, "intermediate_size": 40, "max_position_embeddings": 40}
_SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


def _rope(kind):
    return {"rope_parameters": {"rope_theta": 500.0, **_SCALED[kind]}}


CASES = {
    "gpt2": ("GPT2", _N_SIZES),
    "gptj": ("GPTJ", {**_N_SIZES, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**_N_SIZES, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoX", {**_SIZES, "intermediate_size": 40}),
    "gpt-neox-sequential": ("GPTNeoX", {**_SIZES, "use_parallel_residual": False, "attention_bias": False}),
    "llama": ("Llama", {**_GATED}),
    "llama-grouped": (
        "Llama",
        {**_GATED, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama-biases": ("Llama", {**_GATED, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-linear": ("Llama", {**_GATED, **_rope("linear")}),
    "llama-yarn": ("Llama", {**_GATED, **_rope("yarn")}),
    "llama3": ("Llama", {**_GATED, **_rope("llama3"), "num_key_value_heads": 1}),
    "mistral": ("Mistral", {**_GATED, "num_key_value_heads": 2, "sliding_window": 7}),
    "mistral-no-window": ("Mistral", {**_GATED, "num_key_value_heads": 4, "sliding_window": None}),
    "mixtral": ("Mixtral", {**_GATED, "num_key_value_heads": 2, "num_local_experts": 5}),
    "gemma2": (
        "Gemma2",
        {**_GATED, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 9},
    ),
    "falcon-7b": ("Falcon", {**_SIZES, "multi_query": True}),
    "falcon-40b": ("Falcon", {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon",
        {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": ("Falcon", {**_SIZES, "multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "bloom-odd": ("Bloom", {"vocab_size": 61, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "mpt": ("Mpt", {"vocab_size": 61, "d_model": 32, "n_layers": 3, "n_heads": 4}),
    "starcoder": ("GPTBigCode", _N_SIZES),
    "bigcode-many-keys": ("GPTBigCode", {**_N_SIZES, "multi_query": False, "n_inner": 40}),
}  # fmt: skip


def their_model(case):
    """Return a model of transformers in which every parameter is random, including norms and biases."""
    family, sizes = CASES[case]
    rates = (
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "attention_dropout", "dropout",
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    for rate in rates:
        if hasattr(config, rate):
            setattr(config, rate, 0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return theirs.eval()


def tokens():
    return torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(0))


def loaded(folder):
    config, tensors = import_hf(folder)
    model = Decoder(config).eval()
    model.load_state_dict(dict(tensors), strict=not config.share_embedding_weights)
    return model


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    theirs = their_model(request.param)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return theirs, tmp_path


def test_logits_equal_transformers(case):
    theirs, folder = case
    with torch.no_grad():
        expected = theirs(tokens()).logits
        model = loaded(folder / "theirs")
        torch.testing.assert_close(model.logits(tokens()), expected, rtol=1e-5, atol=1e-5)
        caches = [model.new_cache(20) for _ in tokens()]
        for part in tokens().split([11, 1, 5, 3], dim=1):
            last = model.next_logits(list(map(Piece, part, caches)))
            read = caches[0].length
            torch.testing.assert_close(last, expected[:, read - 1], rtol=1e-5, atol=1e-5)
    assert read == 20


def test_an_export_of_an_import_has_the_same_bits_and_loads(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    export_hf(model.named_parameters(), model.config, folder / "ours", max_shard_bytes=20_000)
    before, after = stored(folder / "theirs"), stored(folder / "ours")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens()).logits, theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_training_step_has_the_same_loss(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    labels = tokens().roll(-1, 1)
    mask = torch.ones_like(labels)
    mask[:, -1] = 0
    batch = {"input_ids": tokens(), "labels": labels, "attention_mask": mask}
    their_labels = torch.where(mask.bool(), labels, -100).roll(1, 1)
    losses = []
    if model.config.moe is not None:
        model.config = model.config.model_copy(
            update={"moe": model.config.moe.model_copy(update={"load_balancing_loss_coef": 0.0})}
        )
    for module, loss in (
        (model, lambda: model(batch)),
        (theirs, lambda: theirs(tokens(), labels=their_labels).loss),
    ):
        losses.append(losses_of_a_step(module, loss))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert losses[0][1] < losses[0][0]


def test_every_format_has_a_case():
    tried = {getattr(transformers, f"{family}Config").model_type for family, _ in CASES.values()}
    assert tried == {format.model_type for format in DECODERS}


@pytest.mark.parametrize("format", DECODERS, ids=lambda format: format.model_type)
def test_missing_keys_have_the_defaults_of_transformers(format):
    full = transformers.AutoConfig.for_model(format.model_type).to_dict()
    sizes = {key.name for ours, key in format.keys.items() if ours in ("hidden_size", "num_heads")}
    sizes |= {key.name for key in format.keys.values() if key.default is REQUIRED}
    least = {key: full[key] for key in sizes if key in full}
    configs = [format.config_from_hf(each, where="config.json") for each in (least, full)]
    assert format.meaning(configs[0]) == format.meaning(configs[1])
    assert configs[0].max_position_embeddings == configs[1].max_position_embeddings


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("falcon", {"alibi": True}, "expected alibi to be False, got True"),
        ("mpt", {"n_heads": 6, "d_model": 48}, "n_heads to be a power of 2, got 6"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "expected clip_qkv to be None, got 6.0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}},
            "rotary scaling 'longrope'",
        ),
        ("llama", {"hidden_act": "mish"}, "nonlinearity"),
        ("llama", {"vocab_size": None}, "vocab_size"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention to be None, got True"),
        ("albert", {}, "no converter for the model_type 'albert'"),
    ],
)
def test_import_refuses_unsupported_configs(tmp_path, model_type, changes, message):
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=message):
        import_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"pos_scaling_type": "ntk", "pos_scaling_factor": 2.0}, "pos_scaling_type"),
        ("llama", {"attention_sliding_window_length": 5}, "attention_sliding_window_length"),
        ("llama", {"norm_type": "layernorm"}, "norm_type"),
        (
            "mistral",
            {"attention_sliding_window_length": 5, "attention_sink_tokens": 2},
            "attention_sink_tokens",
        ),
        ("mixtral", {}, "moe"),
        ("gemma2", {"embeddings_scale": 3.0}, "embeddings_scale"),
        ("bloom", {"nonlinearity": "gelu"}, "nonlinearity"),
        ("falcon", {"nonlinearity": "swiglu"}, "nonlinearity"),
    ],
)
def test_export_refuses_what_the_format_cannot_express(tmp_path, name, changes, message):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    model = Decoder(DecoderConfig.model_validate({"name": name, **sizes, **changes}))
    with pytest.raises(ConfigError, match=message):
        export_hf(model.named_parameters(), model.config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_error_names_the_missing_expert(tmp_path):
    theirs = their_model("mixtral")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_local_experts"] = 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"9 missing tensors: model.layers.0.block_sparse_moe"):
        list(import_hf(tmp_path)[1])


HEADLESS = ["gpt2", "gptj", "gpt-neox", "llama", "mixtral", "falcon-7b", "bloom", "mpt", "starcoder"]


@pytest.mark.parametrize("case", HEADLESS)
def test_the_model_without_its_head(case, tmp_path):
    name = case.partition("-7b")[0]
    format, _ = CONVERTERS[f"{name}-headless"]
    theirs = their_model(case).base_model
    theirs.config.architectures = None
    theirs.save_pretrained(tmp_path / "theirs")
    config, tensors = import_hf(tmp_path / "theirs", format=format)
    model = Decoder(config).eval()
    model.load_state_dict(dict(tensors), strict=not config.share_embedding_weights)
    head = model.embedding if config.share_embedding_weights else model.head
    with torch.no_grad():
        hidden = theirs(tokens()).last_hidden_state
        expected = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
        torch.testing.assert_close(model.logits(tokens()), expected, rtol=1e-5, atol=1e-5)

    export_hf(model.named_parameters(), config, tmp_path / "ours", format=format)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again, info = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again) is type(theirs)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens()).last_hidden_state, hidden, rtol=1e-5, atol=1e-5)


def test_checkpoints_with_and_without_a_head_are_distinguished(tmp_path):
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path / "whole")
    theirs.model.save_pretrained(tmp_path / "headless")
    with pytest.raises(
        ConfigError, match=r"(?s)config of a LlamaModel, got that of a LlamaForCausalLM.*--model llama"
    ):
        import_hf(tmp_path / "whole", format=CONVERTERS["llama-headless"][0])
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40
    )
    transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)no head: it lacks classifier\.weight.*--model bert-sequence-classifier-headless",
    ):
        dict(import_hf(tmp_path / "bert", format=CONVERTERS["bert-sequence-classifier"][0])[1])
    with pytest.raises(
        CheckpointError, match=r"(?s)no head: it lacks lm_head\.weight.*--model llama-headless"
    ):
        dict(import_hf(tmp_path / "headless")[1])
