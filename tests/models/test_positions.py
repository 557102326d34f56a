"""Positions compared with transformers, and the properties of each scheme."""

import math

import pytest
import torch

from headwater.models.layers.positions import (
    RotaryScaling,
    alibi_bias,
    alibi_slopes,
    rotary_frequencies,
    rotary_magnitude,
    rotate,
    rotations,
    sinusoidal_positions,
)

SCALINGS = {
    "none": (None, {"rope_type": "default"}),
    "linear": (RotaryScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        RotaryScaling("yarn", 16.0, original_length=4096),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, all set": (
        RotaryScaling("yarn", 4.0, original_length=2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
    ),
    "llama3": (
        RotaryScaling("llama3", 8.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(kind, theta):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, theirs = SCALINGS[kind]
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**theirs, "rope_theta": theta},
    )
    rotary = LlamaRotaryEmbedding(config)
    ours = rotary_frequencies(128, theta, scaling)
    torch.testing.assert_close(ours, rotary.inv_freq, rtol=1e-6, atol=0)
    assert rotary_magnitude(scaling) == pytest.approx(rotary.attention_scaling)


def test_ntk_divides_the_lowest_frequency_and_keeps_the_highest():
    plain, slowed = (rotary_frequencies(64, 10000.0, s) for s in (None, RotaryScaling("ntk", 8.0)))
    ratio = plain / slowed
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(8.0, rel=1e-4)
    assert bool((ratio.diff() > 0).all())


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_scores_depend_only_on_the_distance(style):
    torch.manual_seed(0)
    frequencies = rotary_frequencies(16, 10000.0)
    query, key = torch.randn(2, 1, 24, dtype=torch.float64)
    score = []
    for start in (0, 5, 90):
        turned = [
            rotate(x.float(), *rotations(torch.tensor([position]), frequencies), style)
            for x, position in ((query, start + 7), (key, start))
        ]
        score.append(float((turned[0] * turned[1]).sum()))
    assert score == pytest.approx([score[0]] * 3, abs=1e-4)
    assert score[0] != pytest.approx(float((query * key).sum()), abs=1e-2), "the rotation has an effect"


def test_rotation_equals_llama_and_gpt_j():
    pytest.importorskip("transformers")
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 16)  # [batch, heads, seq, head size]
    cosines, sines = rotations(torch.arange(10), rotary_frequencies(16, 10000.0))
    whole = [torch.cat((part, part), dim=-1)[None] for part in (cosines, sines)]
    torch.testing.assert_close(rotate(x, cosines, sines, "half"), llama(x, x, *whole)[0])
    theirs = gptj(x.transpose(1, 2), sines[None], cosines[None]).transpose(1, 2)
    torch.testing.assert_close(rotate(x, cosines, sines, "interleaved"), theirs)


def test_other_elements_and_the_dtype_do_not_change():
    x = torch.randn(2, 5, 16).bfloat16()
    turned = rotate(x, *rotations(torch.arange(5), rotary_frequencies(8, 10000.0)), "half")
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned[:, 0], x[:, 0])
    assert not torch.equal(turned[:, 1:, :8], x[:, 1:, :8])


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 25, 32])
def test_slopes_equal_bloom(heads):
    pytest.importorskip("transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), theirs)


def test_alibi_grows_with_the_distance():
    bias = alibi_bias(alibi_slopes(2), torch.tensor([3, 4]), torch.arange(5))
    assert bias.shape == (2, 2, 5)
    assert bias[0, 0].tolist() == pytest.approx([-3 / 16, -2 / 16, -1 / 16, 0, -1 / 16])
    assert torch.equal(bias[1], bias[0] / 16)


def test_sinusoids():
    table = sinusoidal_positions(50, 8)
    for position, element in [(0, 0), (3, 0), (7, 5), (49, 6)]:
        angle = position / 10000 ** (element // 2 * 2 / 8)
        expected = math.cos(angle) if element % 2 else math.sin(angle)
        assert float(table[position, element]) == pytest.approx(expected, abs=1e-5)
