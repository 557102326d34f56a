"""Features of decoders: packed texts, windows, positions, experts, soft caps."""

import pytest
import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.models.decoder import Decoder
from headwater.models.decoder_parameters import init_parameter, learning_rate_scale

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 24,
    "dropout_rate": 0.0,
    "initializer": {"name": "normal", "std": 0.3},
}


def config_of(**changes):
    return DecoderConfig.model_validate({**SIZES, **changes})


def tokens(length, seed=0):
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["learned", "fixed", "rotary", "alibi", None])
def test_packed_texts_do_not_attend_to_each_other(kind):
    """Two packed texts with spans and positions have the same hidden states as separate texts."""
    model = Decoder(config_of(position_embedding_type=kind)).eval()
    first, second = tokens(7), tokens(5, seed=1)
    packed = {
        "input_ids": torch.cat((first, second), dim=1),
        "position_ids": torch.cat((torch.arange(7), torch.arange(5)))[None],
        "attention_span": torch.cat((torch.arange(6, -1, -1), torch.arange(4, -1, -1)))[None],
    }
    targets = torch.roll(packed["input_ids"], -1, 1)
    mask = torch.ones_like(targets)
    with torch.no_grad():
        loss = model({**packed, "labels": targets, "attention_mask": mask})
        alone = [
            model({"input_ids": part, "labels": label, "attention_mask": torch.ones_like(part)})
            * part.shape[1]
            for part, label in ((first, targets[:, :7]), (second, targets[:, 7:]))
        ]
        apart = {name: packed[name] for name in ("input_ids",)}
        together = model({**apart, "labels": targets, "attention_mask": mask})
    torch.testing.assert_close(loss, sum(alone) / 12)
    assert not torch.isclose(loss, together, rtol=1e-4)


@pytest.mark.parametrize("sinks", [0, 2])
def test_window_hides_earlier_tokens_except_sinks(sinks):
    one_layer = {"num_hidden_layers": 1, "position_embedding_type": "rotary"}
    model = Decoder(
        config_of(**one_layer, attention_sliding_window_length=4, attention_sink_tokens=sinks)
    ).eval()
    x = tokens(12)
    with torch.no_grad():
        before = model.logits(x)[0, -1]
        for position in range(12):
            changed = x.clone()
            changed[0, position] = (x[0, position] + 1) % 61
            seen = position >= 8 or position < sinks
            assert torch.equal(model.logits(changed)[0, -1], before) != seen


def test_windows_in_every_second_layer():
    config = config_of(
        attention_sliding_window_length=4, sliding_window_every_other_decoder_layer=True, num_hidden_layers=4
    )
    assert [config.window(layer) for layer in range(4)] == [4, None, 4, None]


def test_soft_cap_bounds_logits_and_changes_the_loss():
    capped = config_of(final_logit_softcapping=2.0)
    model = Decoder(capped).eval()
    x = tokens(20)
    logits = model.logits(x)
    assert float(logits.detach().abs().max()) < 2
    batch = {"input_ids": x, "labels": x.roll(-1, 1), "attention_mask": torch.ones_like(x)}
    loss = model(batch)
    plain = Decoder(capped)
    expected = torch.nn.functional.cross_entropy(plain.logits(x)[0], batch["labels"][0])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_experts_add_their_balance_to_the_loss():
    moe = {"num_experts": 4, "top_k": 2}
    losses = [
        Decoder(config_of(moe={**moe, "load_balancing_loss_coef": coefficient}))(
            {"input_ids": tokens(9), "labels": tokens(9), "attention_mask": torch.ones(1, 9)}
        )
        for coefficient in (0.0, 0.5)
    ]
    assert losses[1] - losses[0] >= 0.5 - 1e-4, "1 is the minimum, if all experts are used equally"


def test_trainable_slopes_start_at_the_fixed_slopes():
    trained, fixed = (
        Decoder(config_of(position_embedding_type="alibi", alibi_trainable_slopes=trainable))
        for trainable in (True, False)
    )
    x = tokens(9)
    assert torch.equal(trained.logits(x), fixed.logits(x))
    trained.logits(x).square().sum().backward()
    assert trained.alibi.slopes.grad.abs().min() > 0
    assert "alibi.slopes" not in dict(fixed.named_parameters())


def test_stacked_weights_are_drawn_one_by_one():
    xavier = {"name": "xavier_uniform"}
    config = config_of(
        initializer=xavier, attention_module="multiquery_attention",
        extra_attention_params={"num_kv_groups": 2}, moe={"num_experts": 4, "top_k": 1}, filter_size=100,
    )  # fmt: skip
    qkv = init_parameter("blocks.0.attention.qkv.weight", (64, 32), config, 0)
    bounds = [part.abs().max().item() for part in qkv.split([32, 16, 16])]
    expected = [(6 / (32 + rows)) ** 0.5 for rows in (32, 16, 16)]
    assert bounds == pytest.approx(expected, rel=0.02)
    experts = init_parameter("blocks.0.ffn.input.weight", (400, 32), config, 0)
    assert experts.abs().max().item() == pytest.approx((6 / 132) ** 0.5, rel=0.02)


def test_widths_scale_the_learning_rates_of_experts_too():
    config = config_of(mup_base_hidden_size=8, mup_base_filter_size=16, moe={"num_experts": 2, "top_k": 1})
    block = "blocks.1.ffn"
    for name in ("router", "input", "shared.input", "shared.gate"):
        assert learning_rate_scale(f"{block}.{name}.weight", config) == 1 / 4
    for name in ("output", "shared.output"):
        assert learning_rate_scale(f"{block}.{name}.weight", config) == 1 / 8
    assert learning_rate_scale(f"{block}.input.bias", config) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "hidden_size.*multiple of num_heads"),
        ({"attention_inner_dim": 30}, "attention_inner_dim.*multiple of num_heads"),
        (
            {"attention_module": "multiquery_attention", "extra_attention_params": {"num_kv_groups": 3}},
            "multiple of num_kv_groups",
        ),
        ({"position_embedding_type": "rotary", "rotary_dim": 10}, "<= the head size"),
        ({"position_embedding_type": "rotary", "rotary_dim": 3}, "expected an even rotary_dim"),
        ({"moe": {"num_experts": 2, "top_k": 3}}, "top_k"),
        ({"moe": {"num_experts": 2, "top_k": 2, "null_expert_bias": 1.0}}, "null_expert_bias"),
        ({"dropout_rate": 0.1, "residual_dropout_rate": 0.2}, "name the same rate"),
    ],
)
def test_incompatible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)
