"""LLaVA compared with transformers: logits, losses, and bit-exact round trips."""

import json

import pytest
import torch
from conversions import losses_of_a_step, stored
from safetensors.torch import load_file, save_file

from headwater.config.models.multimodal import LlavaConfig, MultimodalSimpleConfig
from headwater.convert.checkpoint import export_hf, import_hf, parameter_shapes
from headwater.convert.folder import read_folder, write_folder
from headwater.convert.formats import LLAVA
from headwater.core.errors import ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

IMAGE = 60
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CASES = {
    "published": ({}, {}, {}),
    "last-layer-and-class-token": (
        {},
        {},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "early-layer": ({"hidden_act": "gelu"}, {}, {"vision_feature_layer": 1, "projector_hidden_act": "relu"}),
    "tied-no-bias": ({}, {"tie_word_embeddings": True}, {"multimodal_projector_bias": False}),
    "mistral": ({"patch_size": 4}, {"model_type": "mistral", "sliding_window": 7}, {}),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    vision, text, more = CASES[request.param]
    torch.manual_seed(3)
    text = {"model_type": "llama", **_TEXT, **text}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **_VISION, **vision},
        text_config=text,
        image_token_index=IMAGE,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **more,
    )
    theirs = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return theirs, tmp_path


def loaded(folder):
    config, tensors = import_hf(folder)
    model = build_model(config).eval()
    loaded = model.load_state_dict(dict(tensors), strict=False)
    assert set(loaded.missing_keys) <= {"text_model.head.weight"}  # where it equals the embedding
    assert not loaded.unexpected_keys
    return model


def inputs(config, images=2):
    """Return three samples with `images` images each, at random places in the text."""
    generator, tokens = torch.Generator().manual_seed(0), config.num_features
    length = images * tokens + 12
    ids = torch.randint(0, IMAGE, (3, length), generator=generator)
    places = torch.stack(
        [torch.arange(tokens) + start for start in (2, tokens + 5, tokens + 8, 2 * tokens + 12)][: 2 * images]
    )
    places = torch.stack([places[:images], places[:images] + 1, places[:images] + 2])
    ids.scatter_(1, places.flatten(1), IMAGE)
    pixels = torch.randn(3, images, *config.image_shape, generator=generator)
    return ids, pixels, places


def test_logits_equal_transformers(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    ids, pixels, places = inputs(model.config)
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=pixels.flatten(0, 1)).logits
        ours = model.logits({"input_ids": ids, "images": pixels, "image_places": places})
        elsewhere = model.logits({"input_ids": ids, "images": -pixels, "image_places": places})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert (ours - elsewhere).abs().max() > 0.01


def test_an_export_of_an_import_has_the_same_bits_and_loads(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    export_hf(model.named_parameters(), model.config, folder / "ours", max_shard_bytes=20_000)
    before, after = (stored(folder / kind) for kind in ("theirs", "ours"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in after)
    again, info = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.config.image_token_id == IMAGE
    ids, pixels, _ = inputs(model.config)
    with torch.no_grad():
        pair = [m(input_ids=ids, pixel_values=pixels.flatten(0, 1)).logits for m in (again, theirs)]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_intermediate_folder_keeps_config_and_bits(case):
    _, folder = case
    config, tensors = import_hf(folder / "theirs")
    write_folder(tensors, parameter_shapes(config), config, folder / "between")
    again, kept = read_folder(folder / "between")
    export_hf(kept, again, folder / "ours")
    model, other = loaded(folder / "theirs"), loaded(folder / "ours")
    assert LLAVA.meaning(again) == LLAVA.meaning(config)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_training_step_has_the_same_loss(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    ids, pixels, places = inputs(model.config)
    labels = ids.masked_fill(ids == IMAGE, -100)
    # Our label of a token is at the token's position, theirs at the position of the next token.
    counted = (labels[:, 1:] != -100).float()
    ours = {
        "input_ids": ids[:, :-1],
        "labels": labels[:, 1:].clamp(min=0),
        "attention_mask": counted,
        "images": pixels,
        "image_places": places,
    }
    losses = []
    for module, loss in (
        (model, lambda: model(ours)),
        (theirs, lambda: theirs(input_ids=ids, pixel_values=pixels.flatten(0, 1), labels=labels).loss),
    ):
        losses.append(losses_of_a_step(module, loss))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][1] < losses[0][0]


def test_names_and_sizes_of_published_checkpoints(case):
    """Older files have CLIP's encoder one level deeper, and omit the sizes of the 7B Llama."""
    theirs, folder = case
    for path in (folder / "theirs").glob("*.safetensors"):
        tensors = load_file(path)
        save_file(
            {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in tensors.items()}, path
        )
    model = loaded(folder / "theirs")
    ids, pixels, places = inputs(model.config)
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=pixels.flatten(0, 1)).logits
        ours = model.logits({"input_ids": ids, "images": pixels, "image_places": places})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    content = json.loads((folder / "theirs" / "config.json").read_text())
    content["text_config"] = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5}
    (folder / "theirs" / "config.json").write_text(json.dumps(content))
    text = import_hf(folder / "theirs")[0].text_model
    assert (text.hidden_size, text.num_hidden_layers, text.ffn_size, text.num_heads) == (4096, 32, 11008, 32)


SECTION = {
    "name": "llava",
    "image_model": {
        "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "filter_size": 40, "image_size": [16, 16],
        "use_post_embed_layer_norm": True, "use_embed_proj_bias": False,
    },
    "projector": {
        "image_model": {"input_unit": 32, "layers_units": [16, 16], "layers_activation": ["gelu", None]}
    },
    "text_model": {
        "name": "llama", "vocab_size": 61, "hidden_size": 16, "num_heads": 4, "num_hidden_layers": 1,
        "filter_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "changes", "key"),
    [
        ("image_model", {"use_embed_proj_bias": True}, "use_embed_proj_bias"),
        ("image_model", {"patch_size": [8, 16]}, "patch_size"),
        ("text_model", {"name": "gpt2"}, "gpt2"),
        ("text_model", {"embedding_layer_norm": True}, "embedding_layer_norm"),
        (
            "projector",
            {"image_model": {"input_unit": 32, "layers_units": [16]}},
            "projector",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_export_refuses_what_the_format_cannot_express(part, changes, key, tmp_path):
    config = LlavaConfig.model_validate({**SECTION, part: {**SECTION[part], **changes}})
    with pytest.raises(ConfigError, match=key):
        export_hf(build_model(config).named_parameters(), config, tmp_path / "out")


def test_several_image_models_cannot_be_exported(tmp_path):
    encoder = {"image_encoder": SECTION["image_model"]}
    config = MultimodalSimpleConfig.model_validate(
        {
            "name": "multimodal_simple",
            "image_model_list": {
                "image_models": [encoder, encoder],
                "global_image_projection": SECTION["projector"]["image_model"],
            },
            "text_model": SECTION["text_model"],
        }
    )
    assert config.num_features == 2
    with pytest.raises(ConfigError, match="image_models"):
        export_hf(build_model(config).named_parameters(), config, tmp_path / "out")
