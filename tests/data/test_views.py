"""Views of images: transforms compared with PyTorch, their probabilities, and masks of patches."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional as F

from headwater.config.data import ViewDataConfig
from headwater.config.data.views import MaskedPatchConfig
from headwater.config.models.self_supervised import DinoConfig
from headwater.config.transforms import Transforms
from headwater.core.errors import ConfigError, DataError
from headwater.trainer.datasets import open_data

Image = pytest.importorskip("PIL.Image")
from headwater.data.image.transforms import transform  # noqa: E402
from headwater.data.image.views import random_mask  # noqa: E402

NUMBERS = {"name": "to_tensor"}
TRUNK = {
    "image_model": {"name": "MultiImageViTModel", "image_size": [16, 16], "patch_size": [4, 4]},
    "forward_args": [["ssl_transform.output('global_view')", None, None]],
}
DINO = DinoConfig.model_validate(
    {
        "name": "dino",
        "image_model_trunks": [TRUNK],
        "losses": [{"loss": {"name": "KoLeoLoss"}, "forward_args": [["image_model_trunks.output(0,0,1)"]]}],
    }
)


def picture(seed=0, height=24, width=30):
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * 255
    fine = F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)[0].byte()
    return Image.fromarray(fine.permute(1, 2, 0).numpy())


def changed(image, *transforms, seed=0, part=0):
    steps = TypeAdapter(Transforms).validate_python([*transforms, NUMBERS], strict=True)
    return transform(image, steps, np.random.default_rng(seed), part=part)


def test_gray_is_the_luma_of_television():
    red, green, blue = changed(picture())
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    found = changed(picture(), {"name": "random_gray_scale"})
    torch.testing.assert_close(found, luma.expand(3, -1, -1), rtol=0, atol=1.5 / 255)


def test_solarized_pixels_are_inverted():
    whole = changed(picture())
    found = changed(picture(), {"name": "random_solarize", "threshold": 100})
    torch.testing.assert_close(found, torch.where(whole * 255 >= 99.5, 1 - whole, whole))


def test_blur_is_gaussian():
    radius = 1.5
    steps = torch.arange(-6.0, 7)
    weights = torch.exp(-(steps**2) / (2 * radius**2))
    kernel = (weights[:, None] * weights[None, :] / weights.sum() ** 2).expand(3, 1, -1, -1)
    expected = F.conv2d(changed(picture())[None], kernel, groups=3)[0]
    step = {"name": "random_gaussian_blur_random_radius", "radius_min": radius, "radius_max": radius}
    found = changed(picture(), step)[:, 6:-6, 6:-6]
    torch.testing.assert_close(found, expected, rtol=0, atol=2 / 255)


def test_colour_jitter_stays_in_its_range():
    image, whole = Image.new("RGB", (4, 4), (100, 100, 100)), 100 / 255
    found = [
        float(
            changed(image, {"name": "color_jitter_with_prob", "brightness": 0.4}, seed=seed)[0, 0, 0] / whole
        )
        for seed in range(100)
    ]
    assert 0.59 < min(found) < 0.7 and 1.3 < max(found) < 1.41
    red = Image.new("RGB", (4, 4), (200, 0, 0))
    hues = []
    for seed in range(100):
        pixel = changed(red, {"name": "color_jitter_with_prob", "hue": 0.1}, seed=seed)[:, 0, 0]
        assert float(pixel.max()) == pytest.approx(200 / 255, abs=0.01)
        hues.append(
            float(pixel[1] - pixel[2]) * 255 / 200 / 6
        )  # near red the hue is proportional to green - blue
    assert -0.11 < min(hues) < -0.08 and 0.08 < max(hues) < 0.11
    gray = changed(picture(), {"name": "color_jitter_with_prob", "saturation": 0.0, "contrast": 0.0})
    torch.testing.assert_close(gray, changed(picture()))


def test_transforms_have_a_probability_per_view():
    step = {"name": "random_solarize", "threshold": 0, "p": [1.0, 0.25, 0.0]}
    whole = changed(picture())
    shares = [
        sum(not torch.equal(changed(picture(), step, seed=seed, part=part), whole) for seed in range(200))
        / 200
        for part in range(3)
    ]
    assert shares[0] == 1 and shares[1] == pytest.approx(0.25, abs=0.08) and shares[2] == 0


def test_masks_cover_the_configured_ratio_in_blocks():
    config = MaskedPatchConfig(image_size=224, patch_size=16, mask_ratio_tuple=(0.1, 0.5))
    generator = np.random.default_rng(0)
    masks = np.stack([random_mask(config, generator) for _ in range(600)])
    shares = masks.mean((1, 2))
    assert (shares > 0).mean() == pytest.approx(0.5, abs=0.06)
    some = shares[shares > 0]
    assert 0.09 < some.min() < 0.15 and 0.45 < some.max() <= 0.5
    assert some.mean() == pytest.approx(0.3, abs=0.03)
    # In blocks, a masked patch has more masked neighbours than the mask ratio.
    neighbours = masks[:, :, 1:][masks[:, :, :-1]].mean()
    assert neighbours > 1.5 * some.mean()
    everything = MaskedPatchConfig(
        image_size=32, patch_size=8, mask_probability=1, mask_ratio_tuple=(1.0, 1.0)
    )
    assert random_mask(everything, generator).mean() > 0.7


@pytest.fixture
def folder(tmp_path):
    """Return a folder of three pictures in two classes."""
    for number, label in enumerate(("cat", "cat", "dog")):
        place = tmp_path / "train" / label
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number}.png")
    return tmp_path


def view_config(folder, *, transforms=(), size=16, **changes):
    section = {
        "data_processor": "DinoImageDataProcessor",
        "batch_size": 2,
        "dataset": {"name": "Imagenet", "root": str(folder), "split": "train"},
        "ssl_transform": {
            "name": "Dinov2Transform",
            "multi_crop_transform": {
                "global_num_crops": 2,
                "local_num_crops": 3,
                "global_image_size": size,
                "local_image_size": 8,
                "multicrop_transform_list": [*transforms, NUMBERS],
            },
            "masked_patch_transform": {"image_size": 16, "patch_size": 4, "mask_probability": 1.0},
        },
        **changes,
    }
    return ViewDataConfig.model_validate(section)


def samples_of(config, model=DINO):
    return open_data(config, model, seed=1, repeat=True).samples


def test_batches_of_views(folder):
    step = {"name": "random_solarize", "threshold": 0, "p": [0.0, 0.0, 1.0, 1.0, 1.0]}
    plain, solarized = (samples_of(view_config(folder, transforms=t)) for t in ((), (step,)))
    assert len(plain) == 3
    batch = plain.__getitems__([0, 4])
    assert batch["global_view"].shape == (2, 2, 3, 16, 16) and batch["local_view"].shape == (2, 3, 3, 8, 8)
    assert batch["collated_masks"].shape == (2, 2, 16) and batch["collated_masks"].dtype == torch.bool
    assert batch["collated_masks"].any() and not batch["collated_masks"].all()
    views = torch.cat(
        (batch["global_view"], F.interpolate(batch["local_view"].flatten(0, 1), 16).unflatten(0, (2, 3))), 1
    )
    assert len({each.numpy().tobytes() for each in views.flatten(0, 1)}) == 10
    again = solarized.__getitems__([0])
    assert torch.equal(again["global_view"][0, 0], batch["global_view"][0, 0])


def test_random_choices_depend_only_on_the_draw(folder):
    first, again, other = (samples_of(view_config(folder, shuffle_seed=seed)) for seed in (3, 3, 4))
    whole, part = first.__getitems__([0, 1, 2, 3]), again.__getitems__([2, 0])
    assert all(torch.equal(part[name], whole[name][[2, 0]]) for name in whole)
    assert not torch.equal(
        whole["global_view"][3], whole["global_view"][0]
    )  # the same picture in the next epoch
    assert not torch.equal(other.__getitems__([0])["global_view"], whole["global_view"][:1])


def test_invalid_view_sections_are_errors(folder):
    with pytest.raises(ValidationError, match="masked_patch_transform"):
        view_config(folder, size=32)
    with pytest.raises(ValidationError, match="expected 1 or 5 values of p"):
        view_config(folder, transforms=[{"name": "random_solarize", "p": [0.0, 1.0]}])
    other = TRUNK | {"image_model": TRUNK["image_model"] | {"patch_size": [8, 8]}}
    model = DinoConfig.model_validate(DINO.model_dump(exclude_unset=True) | {"image_model_trunks": [other]})
    with pytest.raises(ConfigError, match=r"patches of \[8, 8\]"):
        samples_of(view_config(folder), model)
    with pytest.raises(DataError, match="no images"):
        samples_of(view_config(folder / "train"))
    (folder / "train" / "cat" / "0.png").write_text("no image")
    found = samples_of(view_config(folder)).__getitems__([0])
    assert isinstance(found, DataError) and found.where.endswith("0.png")
