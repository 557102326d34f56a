"""Models of images and text: each trains with two slabs to the bits of plain PyTorch, frozen parts too."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.multimodal import LlavaConfig, MultimodalSimpleConfig
from headwater.models.registry import build_model

_ENCODER = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "filter_size": 40,
    "image_size": [8, 8],
    "patch_size": [4, 4],
    "use_post_embed_layer_norm": True,
    "dropout_rate": 0.1,
}
_TEXT = {
    "name": "LlamaModel",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 24,
    "embd_pdrop": 0.1,
}
_PROJECTOR = {"input_unit": 24, "layers_units": [32, 32], "layers_activation": ["gelu", None]}
_LLAVA = {
    "name": "llava",
    "image_model": _ENCODER,
    "projector": {"image_model": _PROJECTOR},
    "text_model": _TEXT,
    "image_feature_select_layer_idx": -2,
}
_SIMPLE = {
    "name": "multimodal_simple",
    "image_model_list": {
        "image_feature_select_mode": "cls_patch",
        "image_models": [
            {"image_encoder": {**_ENCODER, "image_layer_idx": 2}},
            {
                "image_encoder": {**_ENCODER, "hidden_size": 16, "patch_size": [8, 8]},
                "projection_layer": {"input_unit": 16, "layers_units": [24], "layers_dropout_rates": [0.1]},
            },
        ],
        "global_image_projection": _PROJECTOR,
    },
    "text_model": {**_TEXT, "name": "gpt2", "share_embedding_weights": True},
    "loss_scaling": "batch_size",
    "loss_weight": 0.1,
}
MODELS = {
    "llava": (LlavaConfig, _LLAVA),
    "llava_first_phase": (LlavaConfig, {**_LLAVA, "freeze": ["^image_model", "^text_model"]}),
    "multimodal_simple": (MultimodalSimpleConfig, _SIMPLE),
    "multimodal_simple_frozen": (
        MultimodalSimpleConfig,
        {**_SIMPLE, "freeze": ["^image_model.image_model_list"]},
    ),
}


def job(name):
    schema, section = MODELS[name]
    config = schema.model_validate(section)

    def batch(step, index):
        generator = torch.Generator().manual_seed(100 * step + index)
        tokens = torch.randint(0, 61, (3, 21), generator=generator)
        places = torch.arange(config.num_features).expand(3, 2, -1) + torch.tensor([1, 10]).view(1, 2, 1)
        places = places.masked_fill(torch.tensor([[0, 0], [0, 1], [1, 1]]).unsqueeze(-1) == 1, 20)
        return {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "attention_mask": torch.ones(3, 20),
            "images": torch.randn(3, 2, *config.image_shape, generator=generator),
            "image_places": places,
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
    assert_equal(train_streamed(job(name), setting, tmp_path, steps=3), expected)


@pytest.mark.parametrize("name", MODELS)
def test_only_trainable_parameters_change(name):
    model, trained = job(name).model(), plain(name).weights
    for parameter, before in model.named_parameters():
        assert torch.equal(before, trained[parameter]) != before.requires_grad, parameter
    learns = {name for name, value in model.named_parameters() if value.requires_grad}
    parts = {name.partition(".")[0] for name in learns}
    assert (
        parts
        == {
            "llava": {"image_model", "projector", "text_model"},
            "llava_first_phase": {"projector"},
            "multimodal_simple": {"image_model", "projector", "text_model"},
            "multimodal_simple_frozen": {"projector", "text_model"},
        }[name]
    )
    unused = "image_model.image_model_list.0.encoder.blocks.3."
    assert not any(name.startswith(unused) for name in learns)


def test_an_absent_image_does_not_change_the_output():
    """An image feature with a position beyond the sequence is ignored; one within it is used."""
    build = job("llava")
    model, batch = build.model().eval(), build.make_batch(0, 0)
    other = {**batch, "images": batch["images"].clone()}
    other["images"][2] += 1  # the sample without images
    with torch.no_grad():
        assert torch.equal(model(batch), model(other))
        other["images"][0, 1] += 1
        assert not torch.equal(model(batch), model(other))
