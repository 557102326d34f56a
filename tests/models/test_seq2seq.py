"""Encoder-decoders: distances, masks, losses and initial values, compared with transformers and PyTorch."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.core.errors import DataError
from headwater.models.layers.positions import sinusoidal_positions
from headwater.models.layers.relative_positions import RelativePositionBias, relative_buckets
from headwater.models.registry import build_model, init_parameter, learning_rate_scale, meta_batch

SIZES = {
    "src_vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": 4,
    "encoder_num_hidden_layers": 2,
    "src_max_position_embeddings": 24,
    "tgt_max_position_embeddings": 16,
}


def config(name="t5", **changes):
    return Seq2SeqConfig.model_validate({"name": name, **SIZES, **changes})


def model(name="t5", **changes):
    """Return a model in eval mode, with weights so large that every part has an effect."""
    made = build_model(config(name, **changes)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def batch(source=20, target=13):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 61, (3, target + 1), generator=generator)
    text, counted = torch.ones(3, source, dtype=torch.int64), torch.ones(3, target, dtype=torch.int64)
    text[1, 15:], counted[2, 7:] = 0, 0
    return {
        "input_ids": torch.randint(1, 61, (3, source), generator=generator),
        "attention_mask": text,
        "decoder_input_ids": tokens[:, :-1],
        "decoder_attention_mask": counted,
        "labels": tokens[:, 1:].clone(),
    }


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (16, 64), (64, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_transformers(buckets, furthest, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-1500, 1501)
    theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, furthest)
    ours = relative_buckets(distance, num_buckets=buckets, max_distance=furthest, bidirectional=bidirectional)
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) == (buckets - 1 if bidirectional else buckets)


def test_bias_depends_only_on_the_distance():
    bias = RelativePositionBias(8, 3, max_distance=20, bidirectional=True)
    nn.init.normal_(bias.weight)
    values = bias(torch.arange(9))
    assert values.shape == (3, 9, 9)
    assert torch.equal(values[:, 1:, 1:], values[:, :-1, :-1])
    assert not torch.equal(values, values.mT)


@pytest.mark.parametrize("name", ["t5", "transformer"])
def test_padding_does_not_change_the_result(name):
    made, whole = model(name), batch()
    other = dict(whole, input_ids=whole["input_ids"].where(whole["attention_mask"].bool(), 7))
    short = {key: value[1:2, :15] for key, value in whole.items()}
    with torch.no_grad():
        logits = made.logits(whole)
        assert torch.equal(made.logits(other), logits)
        torch.testing.assert_close(made.logits(short), logits[1:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "transformer"])
def test_decoder_is_causal(name):
    made, first = model(name), batch()
    other = dict(first, decoder_input_ids=first["decoder_input_ids"].clone())
    other["decoder_input_ids"][:, 6] = 3
    with torch.no_grad():
        a, b = made.logits(first), made.logits(other)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=1e-6, atol=1e-6)
    assert all((a[:, place] - b[:, place]).abs().max() > 1e-3 for place in range(6, 13))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("nonlinearity", ["relu", "gelu"])
def test_logits_equal_torch(norm_first, nonlinearity):
    """Compared with `torch.nn.Transformer` with the same weights, embeddings and head."""
    made = model(
        "transformer",
        use_projection_bias_in_attention=True,
        use_pre_encoder_decoder_layer_norm=norm_first,
        encoder_nonlinearity=nonlinearity,
    )
    given = batch()
    theirs = nn.Transformer(
        32, 4, 2, 2, 40, 0.0, nonlinearity, layer_norm_eps=1e-5, batch_first=True, norm_first=norm_first
    )
    copied = {}
    for name, parameter in made.named_parameters():
        if name.endswith(("embedding.weight", "head.weight")):
            continue
        stack, _, rest = name.partition(".")
        for ours, torchs in (
            ("blocks", "layers"),
            ("cross_attention_norm", "norm2"),
            ("attention_norm", "norm1"),
            ("ffn_norm", "norm3" if stack == "decoder" else "norm2"),
            ("cross_attention.output", "multihead_attn.out_proj"),
            ("attention.output", "self_attn.out_proj"),
            ("attention.qkv.", "self_attn.in_proj_"),
            ("ffn.input", "linear1"),
            ("ffn.output", "linear2"),
        ):
            rest = rest.replace(ours, torchs)
        rest = rest.replace("cross_attention.query.", "multihead_attn.in_proj_")
        rest = rest.replace("cross_attention.key_value.", "multihead_attn.in_proj_")
        key = f"{stack}.{rest}"
        copied[key] = torch.cat((copied[key], parameter)) if key in copied else parameter
    absent = theirs.load_state_dict(copied, strict=False)
    assert not absent.unexpected_keys
    assert all(key.endswith("out_proj.bias") for key in absent.missing_keys)
    with torch.no_grad():
        for key in absent.missing_keys:
            theirs.get_parameter(key).zero_()
        embedded = (
            F.embedding(given[key], made.embedding.weight) + sinusoidal_positions(given[key].shape[1], 32)
            for key in ("input_ids", "decoder_input_ids")
        )
        padding = given["attention_mask"] == 0
        after = torch.ones(13, 13, dtype=torch.bool).triu(1)
        hidden = theirs(
            *embedded, tgt_mask=after, src_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        expected = hidden @ made.embedding.weight.T * 32**-0.5
        torch.testing.assert_close(made.logits(given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scaling", ["num_masked", "batch_size", "precomputed_num_masked"])
def test_loss_is_the_cross_entropy_of_the_labels_that_count(smoothing, scaling):
    made = model(label_smoothing=smoothing, mlm_loss_scaling=scaling, lm_loss_weight=0.3, dropout_rate=0.0)
    given = batch()
    given["labels"][0, 4] = -100
    given["loss_weight"] = torch.tensor([[0.5], [0.1], [0.2]])
    labels = given["labels"].masked_fill(given["decoder_attention_mask"] == 0, -100)
    with torch.no_grad():
        losses = F.cross_entropy(made.logits(given).mT, labels, label_smoothing=smoothing, reduction="none")
    expected = {
        "num_masked": losses.sum() / (labels != -100).sum(),
        "batch_size": losses.sum() * 0.3 / 3,
        "precomputed_num_masked": (losses * given["loss_weight"]).sum() / 3,
    }[scaling]
    torch.testing.assert_close(made.train()(given), expected)


def test_smoothed_gradients_equal_torch():
    made = model(label_smoothing=0.1, mlm_loss_scaling="num_masked", dropout_rate=0.0).train()
    given = dict(batch(), decoder_attention_mask=torch.ones(3, 13))
    ours = torch.autograd.grad(made(given), list(made.parameters()))
    expected = torch.autograd.grad(
        F.cross_entropy(made.logits(given).mT, given["labels"], label_smoothing=0.1), list(made.parameters())
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_accuracy_counts_the_labels_that_count():
    made, given = model(), batch()
    with torch.no_grad():
        made(given)
        right = made.logits(given).argmax(-1) == given["labels"]
    counted = given["decoder_attention_mask"].bool()
    assert made.scored["accuracy"].compute() == pytest.approx(right[counted].float().mean().item())


def test_attention_scores_are_scaled_as_the_family_does():
    assert config().attention_scale("encoder") == 1.0
    assert config("transformer").attention_scale("decoder") == pytest.approx(8**-0.5)
    mup = config(mup_base_d_model=8, mup_base_d_ff=10, decoder_attention_logits_alpha=4.0)
    assert mup.attention_scale("decoder") == pytest.approx(4 / 8 / 4)
    assert config().logits_scale == pytest.approx(32**-0.5)
    assert config(share_embedding_weights=False).logits_scale == 1.0


@pytest.mark.parametrize("name", ["t5", "transformer"])
def test_initial_values_have_the_spread_of_the_papers(name):
    sizes = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_heads": 4, "src_vocab_size": 997}
    made = config(name, **sizes)
    std = {key: init_parameter(key, shape, made, 0).std() for key, shape in (
        ("encoder.blocks.0.ffn.input.weight", (512, 256)),
        ("encoder.blocks.0.ffn.output.weight", (256, 512)),
        ("decoder.blocks.0.cross_attention.query.weight", (128, 256)),
        ("decoder.blocks.0.cross_attention.output.weight", (256, 128)),
    )}  # fmt: skip
    expected = [256**-0.5, 512**-0.5, (256 * 32) ** -0.5, 128**-0.5]
    if name == "transformer":
        expected = [
            math.sqrt(2 / 768),
            math.sqrt(2 / 768),
            math.sqrt(2 / 384 / 32) / 3,
            math.sqrt(2 / 384) / 3,
        ]
    torch.testing.assert_close(torch.stack(list(std.values())), torch.tensor(expected), rtol=0.02, atol=0)
    qkv = init_parameter("encoder.blocks.0.attention.qkv.weight", (384, 256), made, 0)
    assert qkv[:128].std() * 32**0.5 == pytest.approx(qkv[128:].std().item(), rel=0.02)


def test_mup_keeps_logits_and_scales_learning_rates():
    def spread(width):
        made = build_model(
            config(
                d_model=width, num_heads=width // 8, d_ff=2 * width, mup_base_d_model=32, mup_base_d_ff=64,
                src_vocab_size=199,
            )
        ).eval()  # fmt: skip
        with torch.no_grad():
            return made.logits(batch()).std().item()

    assert spread(256) < 2 * spread(32)
    made = config(d_ff=160, mup_base_d_model=8, mup_base_d_ff=40)
    scales = {
        "embedding.weight": 0.5,
        "encoder.blocks.0.attention.qkv.weight": 0.5,
        "decoder.blocks.0.cross_attention.output.weight": 0.5,
        "encoder.blocks.0.ffn.input.weight": 0.25,
        "decoder.blocks.1.ffn.output.weight": 0.25,
        "encoder.norm.weight": 1.0,
    }
    assert {name: learning_rate_scale(name, made) for name in scales} == scales
    assert learning_rate_scale("embedding.weight", config()) == 1.0


def test_too_many_tokens_are_refused():
    with pytest.raises(DataError, match="at most 24 tokens in the encoder, got 25"):
        model("transformer")(batch(source=25))
    with pytest.raises(DataError, match="at most 16 tokens in the decoder, got 17"):
        model("transformer")(batch(target=17))
    assert model("t5")(batch(source=25)).isfinite()


def test_learned_positions_matter():
    made, given = model(position_embedding_type="learned_absolute"), batch()
    with torch.no_grad():
        before = made.logits(given)
        made.encoder.position_embedding.weight[3] += 1
        assert not torch.allclose(made.logits(given), before)


@pytest.mark.parametrize("name", ["t5", "transformer"])
def test_a_dry_run_needs_no_memory(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    example = meta_batch(config(name), 4)
    assert example["input_ids"].shape == (4, 24) and example["labels"].shape == (4, 16)
    with FakeTensorMode():
        made = build_model(config(name))
        fake = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in example.items()}
        made(fake).backward()
        assert made.embedding.weight.grad.shape == (61, 32)
        assert made.eval()(fake).shape == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tgt_vocab_size": 9}, "share_encoder_decoder_embedding"),
        ({"mup_base_d_model": 8}, "expected both or none"),
        ({"mup_base_d_kv": 8}, "mup_base_d_kv needs"),
        ({"relative_attention_max_distance": 16}, "expected relative_attention_max_distance >"),
        (
            {"mup_base_d_model": 8, "mup_base_d_ff": 8, "use_transformer_initialization": True},
            "muP has initializers",
        ),
    ],
)
def test_invalid_sections_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
