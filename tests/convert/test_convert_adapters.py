"""Exported adapters, loaded by the peft library on the exported model without adapters."""

import json

import pytest
import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.preference import DPOConfig
from headwater.convert.adapters import export_adapters
from headwater.convert.checkpoint import export_hf
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.lora import is_adapter
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning", "ignore::FutureWarning")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "filter_size": 128,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}
FAMILIES = {
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "gpt-neox": {},
    "codegen": {"rotary_dim": 4},
    "llama": {
        "attention_module": "multiquery_attention",
        "extra_attention_params": {"num_kv_groups": 2},
    },
    "mistral": {},
    "gemma2": {"embeddings_scale": 32**0.5, "attention_sliding_window_length": 9},
    "falcon": {},
    "bloom": {},
    "mpt": {},
    "starcoder": {},
}
TARGETS = {
    "queries and values": ["proj_q_dense_layer", "proj_v_dense_layer", "proj_output_dense_layer"],
    "one adapter for a stacked layer": ["blocks.*.attention.qkv"],
    "every layer": ["*"],
}


def model(name, lora):
    """Return a model with adapters that are not zero."""
    torch.manual_seed(0)
    config = DecoderConfig.model_validate({"name": name, **SIZES, **FAMILIES[name], "lora_params": lora})
    made = build_model(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def plain_parts(made):
    """Return the model section and the weights without adapters."""
    weights = {name: tensor for name, tensor in made.state_dict().items() if not is_adapter(name)}
    return weights, made.config.model_copy(update={"lora_params": None})


def loaded(folder):
    """Return the library's model in `folder/base` with the adapters in `folder/adapters`.

    Some versions of transformers leave out the soft caps of Gemma 2 in any attention other than `eager`.
    """
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, folder / "adapters").eval()


def tokens():
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same_logits(family, targets, tmp_path):
    made = model(family, {"r": 3, "alpha": 6.0, "target_modules": TARGETS[targets]})
    export_hf(*plain_parts(made), tmp_path / "base")
    export_adapters(made.state_dict().items(), made.config, tmp_path / "adapters")
    theirs = loaded(tmp_path)
    with torch.no_grad():
        found, expected = theirs(tokens()).logits, made.logits(tokens())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        theirs.disable_adapter_layers()
        assert not torch.allclose(theirs(tokens()).logits, expected, atol=1e-2)


def test_two_adapters_in_a_fused_matrix_become_one_of_their_total_rank(tmp_path):
    made = model("gpt2", {"r": 3, "alpha": 6.0, "target_modules": TARGETS["queries and values"]})
    export_adapters(made.state_dict().items(), made.config, tmp_path / "adapters", dtype=torch.bfloat16)
    content = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    fused = [f"transformer.h.{layer}.attn.c_attn" for layer in range(2)]
    assert (content["r"], content["lora_alpha"]) == (3, 6.0)
    assert content["rank_pattern"] == dict.fromkeys(fused, 6)
    assert content["alpha_pattern"] == dict.fromkeys(fused, 12.0)
    weights = peft.utils.load_peft_weights(str(tmp_path / "adapters"), device="cpu")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert len(weights) == 2 * 2 * 2


def test_the_policy_of_dpo_is_exported(tmp_path):
    lora = {"r": 2, "target_modules": ["q_proj"]}
    policy = model("llama", lora)
    weights = policy.state_dict()
    pairs = [
        (f"{part}.{name}", tensor) for part in ("policy", "reference") for name, tensor in weights.items()
    ]
    section = {
        "name": "dpo",
        "policy_model": policy.config.model_dump(exclude_unset=True) | {"name": "llama"},
    }
    export_hf(*plain_parts(policy), tmp_path / "base")
    export_adapters(pairs, DPOConfig.model_validate(section), tmp_path / "adapters")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(tokens()).logits, policy.logits(tokens()))


def test_errors(tmp_path):
    made = model("llama", {"r": 2})
    weights, plain = plain_parts(made)
    with pytest.raises(ConfigError, match="the model has no adapters"):
        export_adapters(weights.items(), plain, tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="4 missing tensors: blocks"):
        some = [pair for pair in made.state_dict().items() if not pair[0].endswith("lora_b")]
        export_adapters(some, made.config, tmp_path / "adapters")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/file").touch()
    with pytest.raises(CheckpointError, match="the output folder is not empty"):
        export_adapters(made.state_dict().items(), made.config, tmp_path / "adapters")
