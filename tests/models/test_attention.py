"""Attention compared with transformers' Llama, Gemma 2 and BLOOM, and with explicit formulas."""

import pytest
import torch

from headwater.models.layers.attention import AttentionContext, LayerCache, Part, SelfAttention, visible
from headwater.models.layers.positions import alibi_bias, alibi_slopes, rotary_frequencies, rotations

WIDTH, HEADS, SEQ = 32, 4, 12


def attention(**changes):
    options = {
        "scale": 8**-0.5,
        "projection_bias": False,
        "output_bias": False,
        "attention_dropout": 0.0,
        "output_dropout": 0.0,
    }
    torch.manual_seed(0)
    module = SelfAttention(WIDTH, HEADS, **{**options, **changes})
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.2)
    return module


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, SEQ, WIDTH)


def positions(start=0, stop=SEQ):
    return torch.arange(start, stop)


def turned(start=0, stop=SEQ):
    return rotations(positions(start, stop), rotary_frequencies(8, 10000.0))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_with_rotations_equal_llama(kv_heads, x):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=kv_heads, attn_implementation="sdpa"
    )
    ours, theirs = attention(num_kv_heads=kv_heads), LlamaAttention(config, layer_idx=0)
    query, key, value = ours.qkv.weight.split(ours.sizes)
    theirs.load_state_dict(
        {
            "q_proj.weight": query,
            "k_proj.weight": key,
            "v_proj.weight": value,
            "o_proj.weight": ours.output.weight,
        }
    )
    whole = [torch.cat((part, part), dim=-1)[None] for part in turned()]
    expected = theirs(x, position_embeddings=tuple(whole), attention_mask=None)[0]
    torch.testing.assert_close(ours(x, AttentionContext(rotations=turned())), expected, rtol=1e-5, atol=1e-6)


def test_softcapped_scores_equal_gemma(x):
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    config = transformers.Gemma2Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.0,
        sliding_window=4,
        layer_types=["sliding_attention"] * 26,
        attn_implementation="eager",
    )
    ours, theirs = attention(num_kv_heads=2, softcap=1.0), Gemma2Attention(config, layer_idx=0).eval()
    query, key, value = ours.qkv.weight.split(ours.sizes)
    theirs.load_state_dict(
        {
            "q_proj.weight": query,
            "k_proj.weight": key,
            "v_proj.weight": value,
            "o_proj.weight": ours.output.weight,
        }
    )
    whole = tuple(torch.cat((part, part), dim=-1)[None] for part in turned())
    for window in (None, 4):
        seen = visible(positions(), positions(), window=window)
        bias = torch.zeros(1, 1, SEQ, SEQ).masked_fill(~seen, -torch.inf)
        expected = theirs(x, position_embeddings=whole, attention_mask=bias)[0]
        given = AttentionContext(None if window is None else seen, turned())
        torch.testing.assert_close(ours(x, given), expected, rtol=1e-5, atol=1e-6)


def test_biases_by_distance_equal_the_formula(x):
    """The scores are computed by the formula of ALiBi's paper."""
    ours = attention()
    bias = alibi_bias(alibi_slopes(HEADS), positions(), positions())
    mask = bias.masked_fill(~visible(positions(), positions()), -torch.inf)
    query, key, value = (part.view(2, SEQ, HEADS, 8).transpose(1, 2) for part in ours.qkv(x).chunk(3, -1))
    weights = (query @ key.mT * ours.scale + mask).softmax(-1)
    expected = ours.output((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x, AttentionContext(mask)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("steps", [[12], [5, 7], [1] * 12, [6, 1, 5]])
def test_cached_attention_equals_the_whole_sequence(softcap, steps, x):
    """The second sequence begins after the first step of the first one, and is read beside it."""
    ours = attention(num_kv_heads=2, softcap=softcap)
    expected = ours(x, AttentionContext(rotations=turned()))
    caches, starts, outputs = [LayerCache(SEQ), LayerCache(SEQ)], [0, 0], ([], [])
    for step in zip([*steps, 0], [0, *steps], strict=True):
        rows = [row for row in (0, 1) if step[row]]
        spans = [(starts[row], starts[row] + step[row]) for row in rows]
        turns = [turned(*span) for span in spans]
        side_by_side = torch.cat([x[row, slice(*span)] for row, span in zip(rows, spans, strict=True)])
        rotations = tuple(torch.cat(parts) for parts in zip(*turns, strict=True))
        found = ours(
            side_by_side[None],
            AttentionContext(rotations=rotations),
            [Part(step[row], caches[row]) for row in rows],
        )
        for row, part in zip(rows, found[0].split([step[row] for row in rows]), strict=True):
            outputs[row].append(part)
            starts[row] += step[row]
    torch.testing.assert_close(torch.stack([*map(torch.cat, outputs)]), expected, rtol=1e-5, atol=1e-6)


def test_visible_keys_of_a_query():
    def rows(**options):
        seen = visible(torch.arange(2, 5), torch.arange(5), **options)
        return ["".join("x" if see else "." for see in row) for row in seen.tolist()]

    assert rows() == ["xxx..", "xxxx.", "xxxxx"]
    assert rows(window=2) == [".xx..", "..xx.", "...xx"]
    assert rows(window=2, sinks=1) == ["xxx..", "x.xx.", "x..xx"]
    assert rows(causal=False) == ["xxxxx"] * 3


def test_dropout_acts_only_in_training(x):
    for softcap in (None, 5.0):
        ours = attention(attention_dropout=0.5, softcap=softcap)
        assert not torch.equal(ours(x), ours(x))
        ours.eval()
        assert torch.equal(ours(x), ours(x))
