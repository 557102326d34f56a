"""Vision transformers compared with transformers: logits, losses, and bit-exact round trips."""

import pytest
import torch
from conversions import losses_of_a_step, stored

from headwater.config.models.vision import ViTConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.core.errors import ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
    "num_labels": 5,
}
CASES = {
    "vit": ("ViT", {**_SIZES, "intermediate_size": 40}),
    "vit-oblong": (
        "ViT",
        {**_SIZES, "intermediate_size": 40, "image_size": [16, 24], "patch_size": [4, 8], "num_channels": 1},
    ),
    "vit-no-bias": ("ViT", {**_SIZES, "intermediate_size": 40, "qkv_bias": False, "hidden_act": "relu"}),
    "dinov2": ("Dinov2", {**_SIZES, "layerscale_value": 0.3}),
    "dinov2-narrow": ("Dinov2", {**_SIZES, "mlp_ratio": 2, "use_mask_token": False}),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    family, sizes = CASES[request.param]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**sizes)
    theirs = getattr(transformers, f"{family}ForImageClassification")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return theirs, tmp_path


def images(theirs):
    config = theirs.config
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
    return torch.randn(3, config.num_channels, *size, generator=torch.Generator().manual_seed(0))


def loaded(folder):
    config, tensors = import_hf(folder)
    model = build_model(config).eval()
    model.load_state_dict(dict(tensors))
    return model


def test_logits_equal_transformers(case):
    theirs, folder = case
    model, inputs = loaded(folder / "theirs"), images(theirs)
    with torch.no_grad():
        expected, ours = theirs(inputs).logits, model.logits({"inputs": inputs})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_an_export_of_an_import_has_the_same_bits_and_loads(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    export_hf(model.named_parameters(), model.config, folder / "ours", max_shard_bytes=20_000)
    before, after = (stored(folder / kind) for kind in ("theirs", "ours"))
    before = {name: tensor for name, tensor in before.items() if "mask_token" not in name}  # not imported
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in after)
    again, info = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        inputs = images(theirs)
        torch.testing.assert_close(again(inputs).logits, theirs(inputs).logits, rtol=1e-5, atol=1e-5)


def test_training_step_has_the_same_loss(case):
    theirs, folder = case
    model, inputs, labels = loaded(folder / "theirs"), images(theirs), torch.tensor([1, 4, 0])
    losses = []
    for module, loss in (
        (model, lambda: model({"inputs": inputs, "labels": labels})),
        (theirs, lambda: theirs(inputs, labels=labels).loss),
    ):
        losses.append(losses_of_a_step(module, loss))
    # The gradient of the key biases is zero except for rounding, which Adam turns into a full step.
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm_first": False}, "norm_first"),
        ({"layerscale_value": 0.1}, "layerscale_value"),
        ({"use_dinov2_classifier": True}, "layerscale_value"),
        ({"use_encoder_pooler_layer": True}, "use_encoder_pooler_layer"),
        ({"prepend_cls_token": False}, "prepend_cls_token"),
        ({"use_bias_in_output": False}, "use_bias_in_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_export_refuses_what_the_formats_cannot_express(changes, key, tmp_path):
    sizes = {
        "hidden_size": 32,
        "num_heads": 4,
        "num_hidden_layers": 1,
        "filter_size": 40,
        "image_size": [16, 16],
    }
    config = ViTConfig.model_validate({"name": "vision_transformer", **sizes, **changes})
    with pytest.raises(ConfigError, match=key):
        export_hf(build_model(config).named_parameters(), config, tmp_path / "out")
