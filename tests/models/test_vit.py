"""The vision transformer compared with one built from PyTorch's layers, and its section."""

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import nn

from headwater.config.models.vision import ViTConfig
from headwater.core.errors import ConfigError, DataError
from headwater.models.registry import build_model, meta_batch
from shared_data import SHARED

SIZES = {
    "name": "vision_transformer",
    "num_classes": 7,
    "image_size": [8, 12],
    "patch_size": [4, 4],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 48,
}


def vit(**changes):
    return build_model(ViTConfig.model_validate({**SIZES, **changes}), seed=5)


def images(count=3, channels=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, channels, 8, 12, generator=generator)


class Plain(nn.Module):
    """The same model built from PyTorch's layers."""

    def __init__(self, ours):
        super().__init__()
        self.ours, config = ours, ours.config
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, 0.0, "gelu", 1e-5, batch_first=True, norm_first=config.norm_first
        )
        norm = nn.LayerNorm(32) if config.norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        encoder = ours.vit_model
        with torch.no_grad():
            self.patches.weight.copy_(encoder.patches.weight.view(32, 3, 4, 4))
            self.patches.bias.copy_(encoder.patches.bias)
            for block, own in zip(encoder.blocks, self.encoder.layers, strict=True):
                own.self_attn.in_proj_weight.copy_(block.attention.qkv.weight)
                own.self_attn.in_proj_bias.copy_(block.attention.qkv.bias)
                for there, here in (
                    (own.self_attn.out_proj, block.attention.output),
                    (own.linear1, block.ffn.input),
                    (own.linear2, block.ffn.output),
                    (own.norm1, block.attention_norm),
                    (own.norm2, block.ffn_norm),
                ):
                    there.load_state_dict(here.state_dict())
            if norm is not None:
                self.encoder.norm.load_state_dict(encoder.norm.state_dict())

    def forward(self, inputs):
        encoder, config = self.ours.vit_model, self.ours.config
        x = self.patches(inputs).flatten(2).transpose(1, 2)
        if config.prepend_cls_token:
            x = torch.cat((encoder.class_token.weight.expand(len(x), 1, 32), x), 1)
        if config.position_embedding_type == "learned":
            x = x + encoder.positions.weight
        if encoder.embedding_norm is not None:
            x = encoder.embedding_norm(x)
        x = self.encoder(x)
        if config.use_dinov2_classifier:
            x = torch.cat((x[:, 0], x[:, 1:].mean(1)), -1)
        elif config.use_encoder_pooler_layer:
            x = self.ours.pooler.dense(x[:, 0]).tanh()
        else:
            x = x[:, 0] if config.prepend_cls_token else x.mean(1)
        return self.ours.classifier(x)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_first": False},
        {"prepend_cls_token": False, "position_embedding_type": None},
        {"use_encoder_pooler_layer": True, "use_post_embed_layer_norm": True},
        {"use_dinov2_classifier": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_equals_a_model_of_pytorchs_layers(changes):
    model = vit(**changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        expected = Plain(model).eval()(images())
    torch.testing.assert_close(model.logits({"inputs": images()}), expected, rtol=1e-5, atol=1e-5)


def test_fixed_positions_distinguish_patches():
    with_, without = (vit(position_embedding_type=kind).eval() for kind in ("fixed", None))
    swapped = torch.cat((images()[..., 4:8], images()[..., :4], images()[..., 8:]), -1)
    close = [
        torch.allclose(model.logits({"inputs": images()}), model.logits({"inputs": swapped}), atol=1e-6)
        for model in (with_, without)
    ]
    assert close == [False, True]


@torch.no_grad()
def test_initial_values():
    model = vit(layerscale_value=0.25, initializer_range=0.05)
    scales = [value for name, value in model.named_parameters() if name.endswith("_scale.weight")]
    assert len(scales) == 4 and all(bool((scale == 0.25).all()) for scale in scales)
    block = model.vit_model.blocks[0]
    assert float(block.ffn.input.weight.std()) == pytest.approx(0.05, rel=0.2)
    assert bool((block.ffn_norm.weight == 1).all()) and not block.ffn.input.bias.any()
    assert float(model.vit_model.positions.weight.std()) == pytest.approx(0.05, rel=0.3)


def test_accuracy_is_counted_in_eval_mode():
    model = vit()
    labels = model.logits({"inputs": images()}).argmax(-1)
    labels[0] = (labels[0] + 1) % 7
    model({"inputs": images(), "labels": labels})
    assert model.scored["accuracy"].update_count == 0
    model.eval()({"inputs": images(), "labels": labels})
    assert model.scored["accuracy"].compute() == pytest.approx(2 / 3)


def test_images_of_another_size_are_an_error():
    with pytest.raises(DataError, match=r"\[3, 8, 12\].*\[3, 8, 8\]"):
        vit().logits({"inputs": torch.zeros(1, 3, 8, 8)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": [10, 12]}, "image_size"),
        ({"num_heads": 5}, "num_heads"),
        ({"use_dinov2_classifier": True, "prepend_cls_token": False}, "prepend_cls_token"),
        ({"use_dinov2_classifier": True, "use_encoder_pooler_layer": True}, "cannot be used together"),
    ],
)
def test_contradictory_sections_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        vit(**changes)


@pytest.mark.parametrize(("pattern", "message"), [("^image", "vit_model, classifier"), ("(", "expression")])
def test_freeze_names_parameters(pattern, message):
    with pytest.raises(ConfigError, match=message):
        vit(freeze=[pattern])
    model = vit(freeze=["^vit_model"])
    assert [name for name, value in model.named_parameters() if value.requires_grad] == [
        "classifier.weight",
        "classifier.bias",
    ]


@pytest.mark.parametrize(
    ("file", "parameters", "trained"),
    [
        ("vision_transformer/configs/params_vit_base_patch_16_imagenet_1k.yaml", 86_567_656, 86_567_656),
        ("vision_transformer/configs/params_vit_huge_patch_16_imagenet_1k.yaml", None, None),
        ("dino/configs/params_dinov2_large_eval_linear.yaml", None, 2049 * 1000),
    ],
)
def test_models_of_public_files_build(file, parameters, trained):
    path = SHARED / "public_params" / "vision" / file
    if not path.exists():
        pytest.skip("the public params files are not here")
    config = ViTConfig.model_validate(yaml.safe_load(path.read_text())["trainer"]["init"]["model"])
    model = build_model(config, device="meta")
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    # The size of ViT-Base is that of vit-base-patch16-224 in the transformers library.
    assert parameters is None or sum(sizes.values()) == parameters
    assert trained is None or trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model(meta_batch(config, 2)).shape == ()
