"""Linformer: attention compared with its formula, and its cost."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwater.config.models.encoder import BertConfig, ClassifierConfig
from headwater.convert.formats import format_of_config
from headwater.core.errors import ConfigError, DataError
from headwater.core.precision import Precision
from headwater.models.registry import build_model, meta_batch
from headwater.plan.trace import trace_step

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 48,
    "max_position_embeddings": 24,
    "dropout_rate": 0.0,
}


def config(sharing="layerwise", length=6, **changes):
    params = {"projected_length": length, "sharing": sharing}
    keys = {"name": "bert", "attention_module": "linformer", "extra_attention_params": params}
    return BertConfig.model_validate({**SIZES, **keys, **changes})


def written_out(attention, x, text):
    """Return equation 7 of arXiv:2006.04768, head by head; `text` [batch, seq] is 0 in padding."""
    width, size = x.shape[-1], attention.head_size
    projections = [
        part.weight[:, : x.shape[1]] for part in (attention.projections.keys, attention.projections.values)
    ]
    rows = []
    for sample, mask in zip(x, text, strict=True):
        heads = []
        for head in range(width // size):
            query, key, value = (
                F.linear(
                    sample, weight[head * size : (head + 1) * size], bias[head * size : (head + 1) * size]
                )
                for weight, bias in zip(
                    attention.qkv.weight.split(width), attention.qkv.bias.split(width), strict=True
                )
            )
            seen = mask.bool()
            keys, values = (
                projection[:, seen] @ part[seen]
                for projection, part in zip(projections, (key, value), strict=True)
            )
            heads.append((query @ keys.T / size**0.5).softmax(-1) @ values)
        rows.append(attention.output(torch.cat(heads, -1)))
    return torch.stack(rows)


@pytest.mark.parametrize("length", [24, 17])
@pytest.mark.parametrize("sharing", ["headwise", "key_value", "layerwise"])
def test_attention_equals_the_formula(sharing, length):
    model = build_model(config(sharing)).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (2, length), generator=generator)
    text = torch.ones_like(ids)
    text[1, 11:] = 0
    block, seen = model.encoder.blocks[1].attention, []
    block.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        model.encoder(ids, text)
        ((x, attended),) = seen
        torch.testing.assert_close(attended, written_out(block, x, text), rtol=1e-5, atol=1e-6)


def test_padding_does_not_change_the_result():
    model = build_model(config()).eval()
    ids = torch.arange(24)[None] % 61
    text = (torch.arange(24) < 15).long()[None]
    with torch.no_grad():
        expected = model.encoder(ids[:, :15], text[:, :15])
        torch.testing.assert_close(model.encoder(ids, text)[:, :15], expected)
        assert not torch.allclose(model.encoder(ids, torch.ones_like(text))[:, :15], expected, atol=1e-3)


@pytest.mark.parametrize(("sharing", "count"), [("headwise", 4), ("key_value", 2), ("layerwise", 1)])
def test_projections_are_shared(sharing, count):
    """Two layers; section 4 of the paper counts 24, 12 and 1 projections for twelve layers."""
    plain = build_model(BertConfig.model_validate({"name": "bert", **SIZES}))
    ours = build_model(config(sharing))
    extra = sum(value.numel() for value in ours.parameters()) - sum(
        value.numel() for value in plain.parameters()
    )
    assert extra == count * 6 * 24
    spread = [value.std().item() for name, value in ours.named_parameters() if "projection" in name]
    assert len(spread) == count
    assert all(each == pytest.approx(6**-0.5, rel=0.2) for each in spread)


def cost_of_a_block(section, length):
    """Return the operations of attention and saved bytes of the last block, as the planner counts them."""
    model = build_model(section, device="meta")
    batch = meta_batch(section, 1, length)
    # Operations of the fused kernel are not counted, those of its formula are.
    with sdpa_kernel(SDPBackend.MATH):
        trace = trace_step(model, batch, Precision())
    (index,) = (stage.index for stage in trace.stages if stage.name == "encoder.blocks.1")
    matrices = sum(value.numel() for value in model.encoder.blocks[1].ffn.parameters() if value.dim() == 2)
    matrices += sum(
        value.weight.numel()
        for value in (model.encoder.blocks[1].attention.qkv, model.encoder.blocks[1].attention.output)
    )
    cost = trace.costs[index]
    return cost.forward.flops - 2 * length * matrices, cost.saved_bytes


def test_cost_is_linear_in_the_length():
    """4,096 tokens instead of 512 cost 8 times as much; with full attention it would be 64 times."""
    keys = {"name": "bert", **SIZES, "max_position_embeddings": 4096}
    plain = BertConfig.model_validate(keys)
    ours = config(length=128, max_position_embeddings=4096)
    for section, growth, seen in ((plain, 64, 512), (ours, 8, 128)):
        short, long = (cost_of_a_block(section, length) for length in (512, 4096))
        assert short[0] == 4 * 512 * seen * SIZES["hidden_size"]
        assert long[0] == growth * short[0]
        assert long[1] == pytest.approx(growth * short[1], rel=0.2)


def test_fine_tuning_starts_from_the_pretrained_encoder():
    keys = {
        key: value for key, value in config().model_dump().items() if key in ClassifierConfig.model_fields
    }
    classifier = build_model(ClassifierConfig.model_validate({**keys, "name": "bert/classifier"}))
    names = {name for name, _ in build_model(config()).encoder.named_parameters()}
    assert names == {name for name, _ in classifier.encoder.named_parameters()}
    batch = {
        "input_ids": torch.arange(24)[None],
        "attention_mask": torch.ones(1, 24, dtype=torch.long),
        "labels": torch.tensor([1]),
    }
    classifier(batch).backward()
    assert classifier.encoder.projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_attention_params": {"projected_length": 25}}, "expected projected_length"),
        ({"position_embedding_type": "rotary"}, "cannot be used with position_embedding_type rotary"),
        ({"attention_module": "aiayn_attention"}, "extra_attention_params need attention_module"),
    ],
)
def test_incompatible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_packed_texts_are_refused():
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(DataError, match="packed texts"):
        build_model(config()).encoder(ids, torch.ones_like(ids), attention_span=torch.ones_like(ids))


def test_export_is_refused():
    with pytest.raises(ConfigError, match="attention_module"):
        format_of_config(config()).config_to_hf(config())
