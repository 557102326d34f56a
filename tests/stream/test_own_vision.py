"""Models of images: each trains with two slabs to the bits of plain PyTorch, buffers and frozen parts too."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.vision import UNetConfig, ViTConfig
from headwater.models.registry import build_model

_VIT = {
    "name": "vision_transformer",
    "num_classes": 7,
    "image_size": [8, 12],
    "patch_size": [4, 4],
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "filter_size": 48,
    "dropout_rate": 0.1,
    "embedding_dropout_rate": 0.1,
}
_UNET = {
    "name": "unet",
    "num_classes": 3,
    "encoder_filters": [8, 12, 16],
    "image_size": [8, 12],
    "dropout_rate": 0.1,
}
MODELS = {
    "vit": (ViTConfig, _VIT),
    "vit_dinov2": (ViTConfig, {**_VIT, "use_dinov2_classifier": True, "layerscale_value": 0.1}),
    "vit_frozen": (ViTConfig, {**_VIT, "freeze": [r"^vit_model\.(patches|blocks\.[01])\b"]}),
    "unet_batch_norm": (UNetConfig, {**_UNET, "loss": "cross_entropy_dice"}),
    "unet_instance_norm": (UNetConfig, {**_UNET, "norm_layer": "instancenorm2d", "loss": "bce"}),
    "unet_frozen": (UNetConfig, {**_UNET, "freeze": [r"^down\.0\."]}),
}


def job(name):
    schema, section = MODELS[name]
    config = schema.model_validate(section)
    channels = config.num_channels if schema is ViTConfig else config.input_channels
    size = () if schema is ViTConfig else config.image_size

    def batch(step, index):
        generator = torch.Generator().manual_seed(100 * step + index)
        return {
            "inputs": torch.randn(3, channels, *config.image_size, generator=generator),
            "labels": torch.randint(0, config.num_classes, (3, *size), generator=generator),
        }

    return Job(lambda: build_model(config), batch, lambda model, batch: model(batch), micro_batches=2)


@functools.cache
def plain(name):
    return train_plain(job(name), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_streamed_model_equals_plain_pytorch(name, setting, tmp_path):
    expected = plain(name)
    assert len(set(expected.losses)) == 3
    assert bool(expected.buffers) == (name in ("unet_batch_norm", "unet_frozen"))
    assert_equal(train_streamed(job(name), setting, tmp_path, steps=3), expected)


@pytest.mark.parametrize("name", ["vit_frozen", "unet_frozen"])
def test_frozen_parameters_stay(name):
    model, trained = job(name).model(), plain(name).weights
    for parameter, before in model.named_parameters():
        assert torch.equal(before, trained[parameter]) != before.requires_grad
    kept = sum(not value.requires_grad for value in model.parameters())
    assert 0 < kept < len(trained)
