"""Jais and BTLM compared with their formulas in plain PyTorch, and bit-exact round trips."""

import json
import math

import pytest
import torch
from conversions import stored
from safetensors.torch import save_file
from torch.nn import functional as F

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.core.errors import ConfigError
from headwater.models.registry import build_model

HEADS, WIDTH, INNER = 4, 32, 40
CONFIG = {
    "vocab_size": 61,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": 2,
    "n_inner": INNER,
    "n_positions": 16,
    "activation_function": "swiglu",
    "position_embedding_type": "alibi",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MUP = {
    "mup_width_scale": 0.25,
    "mup_output_alpha": 2.2,
    "mup_embeddings_scale": 9.5,
    "mup_scale_qk_dot_by_d": True,
}
OLDER = {key.removeprefix("mup_"): value for key, value in MUP.items()}
MODELS = {
    "jais": ("jais", "JAISLMHeadModel", MUP),
    "jais-first-release": ("jais", "JAISLMHeadModel", OLDER),
    "btlm": ("btlm", "BTLMLMHeadModel", MUP | {"mup_scale_qk_dot_by_d": False}),
}


def tensors():
    """Return random tensors by published names; the first dimension of block matrices is the input."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    found = {"transformer.wte.weight": drawn(61, WIDTH)}
    for name in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        found |= {f"transformer.{name}.weight": 1 + drawn(WIDTH), f"transformer.{name}.bias": drawn(WIDTH)}
    sizes = {
        "attn.c_attn": (WIDTH, 3 * WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (WIDTH, INNER),
        "mlp.c_fc2": (WIDTH, INNER),
        "mlp.c_proj": (INNER, WIDTH),
    }
    for layer in range(2):
        for name, (inputs, outputs) in sizes.items():
            found[f"transformer.h.{layer}.{name}.weight"] = drawn(inputs, outputs)
            found[f"transformer.h.{layer}.{name}.bias"] = drawn(outputs)
    return found


def logits(state, ids, config):
    """Return the logits by the published formulas, step by step."""

    def scale(key):
        return config.get(f"mup_{key}", config.get(key))

    def linear(x, name):
        return x @ state[f"transformer.{name}.weight"] + state[f"transformer.{name}.bias"]

    def norm(x, name):
        return F.layer_norm(
            x, (WIDTH,), state[f"transformer.{name}.weight"], state[f"transformer.{name}.bias"]
        )

    length, size = ids.shape[1], WIDTH // HEADS
    slopes = torch.tensor([2 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])
    places = torch.arange(length)
    distance = (places[None, :] - places[:, None]).float()
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -math.inf)
    x = F.embedding(ids, state["transformer.wte.weight"]) * scale("embeddings_scale")
    for layer in range(2):
        block = f"h.{layer}"
        query, key, value = (
            part.unflatten(-1, (HEADS, size)).transpose(1, 2)
            for part in linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(WIDTH, -1)
        )
        power = 1.0 if scale("scale_qk_dot_by_d") else 0.5
        weights = (query @ key.transpose(-1, -2) / size**power + bias).softmax(-1)
        x = x + linear((weights @ value).transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        normed = norm(x, f"{block}.ln_2")
        gated = linear(normed, f"{block}.mlp.c_fc") * F.silu(linear(normed, f"{block}.mlp.c_fc2"))
        x = x + linear(gated, f"{block}.mlp.c_proj")
    factor = scale("output_alpha") * scale("width_scale")
    return norm(x, "ln_f") @ state["transformer.wte.weight"].T * factor


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_and_the_same_bits_back(name, tmp_path):
    kind, architecture, scales = MODELS[name]
    config = {"model_type": kind, "architectures": [architecture], **CONFIG, **scales}
    state = tensors()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "there/model.safetensors")
    section, parameters = import_hf(tmp_path / "there")
    assert section.name == kind
    ours = build_model(section).eval()
    ours.load_state_dict(dict(parameters), strict=False)
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.logits(ids), logits(state, ids, config), rtol=1e-4, atol=1e-4)

    export_hf(dict(ours.named_parameters()), section, tmp_path / "back")
    back = stored(tmp_path / "back")
    assert back.keys() - {"lm_head.weight"} == state.keys()
    assert all(torch.equal(back[key], value) for key, value in state.items())
    again = json.loads((tmp_path / "back/config.json").read_text())
    assert again["architectures"] == [architecture]
    torch.testing.assert_close(logits(back, ids, again), logits(state, ids, config), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"activation_function": "gelu"}, {"position_embedding_type": "learned"}])
def test_other_variants_are_refused(wrong, tmp_path):
    config = {"model_type": "jais", **CONFIG, **wrong}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"expected {next(iter(wrong))} to be"):
        import_hf(tmp_path)
