"""Images: transforms compared with PyTorch, folders of classes, and classes of pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional as F

from headwater.config import load_params, shipped_params
from headwater.config.data import ImageFolderDataConfig, SegmentationDataConfig
from headwater.config.models.vision import UNetConfig, ViTConfig
from headwater.config.transforms import Transforms
from headwater.core.errors import ConfigError, DataError
from headwater.trainer.datasets import open_data
from shared_data import SHARED

Image = pytest.importorskip("PIL.Image")
from headwater.data.image.transforms import transform  # noqa: E402

VIT = ViTConfig(name="vision_transformer", num_classes=3, image_size=(8, 8), patch_size=(4, 4))
UNET = UNetConfig(name="unet", encoder_filters=(4, 8), image_size=(8, 8))
NUMBERS = {"name": "to_tensor"}


def picture(height=20, width=30, seed=0, channels=3):
    """Return smooth noise, for which all methods of scaling agree."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, channels, 4, 4, generator=generator) * 255
    fine = F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)[0].byte()
    pixels = fine.permute(1, 2, 0).numpy()
    return Image.fromarray(pixels if channels > 1 else pixels[..., 0])


def numbers(image):
    array = np.array(image)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1).float() / 255


def changed(image, *transforms, seed=0):
    steps = TypeAdapter(Transforms).validate_python(list(transforms), strict=True)
    return transform(image, steps, np.random.default_rng(seed))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "shape"), [([12, 14], (12, 14)), (10, (10, 15)), ([40, 50], (40, 50))], ids=str
)
def test_resize(size, shape, interpolation):
    ours = changed(picture(), {"name": "resize", "size": size, "interpolation": interpolation}, NUMBERS)
    expected = F.interpolate(numbers(picture())[None], shape, mode=interpolation, antialias=True)[0]
    torch.testing.assert_close(ours, expected.clamp(0, 1), rtol=0, atol=1.5 / 255)


def test_crops_flips_and_normalization():
    whole = numbers(picture())
    assert torch.equal(changed(picture(), NUMBERS), whole)
    cut = changed(picture(), {"name": "center_crop", "size": [8, 10]}, NUMBERS)
    assert torch.equal(cut, whole[:, 6:14, 10:20])
    padded = changed(picture(), {"name": "center_crop", "size": 24}, NUMBERS)
    assert torch.equal(padded[:, 2:22], whole[:, :, 3:27]) and not padded[:, :2].any()
    for name, axis in (("horizontal", 2), ("vertical", 1)):
        flip = {"name": f"random_{name}_flip"}
        assert torch.equal(changed(picture(), {**flip, "p": 1}, NUMBERS), whole.flip(axis))
        assert torch.equal(changed(picture(), {**flip, "p": 0}, NUMBERS), whole)
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    ours = changed(picture(), NUMBERS, {"name": "normalize", "mean": mean, "std": std})
    expected = torch.stack([(whole[i] - mean[i]) / std[i] for i in range(3)])
    torch.testing.assert_close(ours, expected)


def test_random_crops_lie_in_the_image():
    whole = numbers(picture())
    windows = whole.unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    places = set()
    for seed in range(40):
        cut = changed(picture(), {"name": "random_crop", "size": 8}, NUMBERS, seed=seed)
        found = (windows == cut).flatten(1).all(1).nonzero().flatten().tolist()
        assert found
        places.add(found[0])
    assert len(places) > 20


def test_random_resized_crops_have_the_configured_scale_and_ratio():
    """The channels of the picture hold the position of each pixel, so that a crop shows its corners."""
    rows, columns = np.mgrid[0:200, 0:250].astype(np.uint8)
    image = Image.fromarray(np.stack([rows, columns, rows], axis=-1))
    step = {"name": "random_resized_crop", "size": 64, "scale": [0.2, 0.5], "ratio": [0.5, 2.0]}
    shares, shapes = [], []
    for seed in range(60):
        part = changed(image, {**step, "interpolation": "nearest"}, NUMBERS, seed=seed) * 255
        height, width = (float(part[axis].max() - part[axis].min()) * 64 / 63 for axis in (0, 1))
        shares.append(height * width / (200 * 250))
        shapes.append(width / height)
    assert 0.18 < min(shares) < 0.27 and 0.43 < max(shares) < 0.53
    assert 0.45 < min(shapes) < 0.75 and 1.35 < max(shapes) < 2.2


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([{"name": "to_tensr"}], "to_tensor"),
        ([{"name": "resize", "size": 3}], "expected to_tensor once"),
        ([NUMBERS, {"name": "resize", "size": 3}], "before to_tensor"),
        ([{"name": "normalize", "mean": [0.0], "std": [1.0]}, NUMBERS], "after to_tensor"),
        ([NUMBERS, {"name": "normalize", "mean": [0.0], "std": [0.0]}], "expected std > 0"),
        ([{"name": "random_resized_crop", "size": 3, "scale": [1.0, 0.1]}, NUMBERS], "two ascending numbers"),
        ([{"name": "resize", "size": [1, 2, 3]}, NUMBERS], "at most 2"),
    ],
)
def test_invalid_transforms_are_refused(transforms, message):
    with pytest.raises(ValidationError, match=message):
        folder_config(Path(), transforms=transforms)


def folder_config(folder, **changes):
    section = {"data_processor": "ImageNet1KProcessor", "data_dir": str(folder), "batch_size": 2, **changes}
    return ImageFolderDataConfig.model_validate(section)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of five pictures in two classes."""
    for label, count in (("cat", 3), ("dog", 2)):
        place = tmp_path / "train" / label
        place.mkdir(parents=True)
        for number in range(count):
            picture(seed=number + 10 * count).save(place / f"{number}.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


CROP = [{"name": "random_resized_crop", "size": 8}, {"name": "random_horizontal_flip"}, NUMBERS]


def test_folders_of_classes(folder):
    source = open_data(folder_config(folder, image_size=[8, 8], drop_last=False), VIT, seed=1, repeat=False)
    batches = list(source.create_dataloader())
    assert torch.cat([each["labels"] for each in batches]).tolist() == [0, 0, 0, 1, 1]
    expected = Image.open(folder / "train" / "cat" / "1.png").resize((8, 8), Image.Resampling.BILINEAR)
    assert torch.equal(batches[0]["inputs"][1], numbers(expected))


def test_random_choices_depend_only_on_the_draw(folder):
    samples, again, other = (
        open_data(folder_config(folder, transforms=CROP, shuffle_seed=seed), VIT, seed=1, repeat=True).samples
        for seed in (3, 3, 4)
    )
    whole = samples.__getitems__([0, 1, 2, 3])["inputs"]
    assert torch.equal(again.__getitems__([2, 0])["inputs"], whole[[2, 0]])
    assert not torch.equal(
        samples.__getitems__([5])["inputs"], whole[:1]
    )  # the same picture in the next epoch
    assert not torch.equal(other.__getitems__([0])["inputs"], whole[:1])


def test_images_are_converted_to_the_channels_of_the_model(folder):
    picture(seed=9, channels=1).save(folder / "train" / "cat" / "0.png")
    config = folder_config(folder, image_size=[8, 8])
    inputs = open_data(config, VIT, seed=1, repeat=False).samples.__getitems__([0])["inputs"]
    assert inputs.shape == (1, 3, 8, 8) and torch.equal(inputs[:, 0], inputs[:, 1])
    gray = VIT.model_copy(update={"num_channels": 1})
    inputs = open_data(config, gray, seed=1, repeat=False).samples.__getitems__([1])["inputs"]
    assert inputs.shape == (1, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"expected a model with 1, 3 or 4 channels .* got 2"):
        open_data(config, VIT.model_copy(update={"num_channels": 2}), seed=1, repeat=False)


def test_invalid_folders_are_errors(folder):
    def first(**changes):
        source = open_data(folder_config(folder, **changes), VIT, seed=1, repeat=False)
        return next(iter(source.create_dataloader()))

    with pytest.raises(DataError, match="no images"):
        first(split="val")
    with pytest.raises(DataError, match="set num_classes to 2"):
        first(num_classes=1)
    picture(height=9, width=9).save(folder / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match="different sizes"):
        first()
    whole = (folder / "train" / "cat" / "0.png").read_bytes()
    (folder / "train" / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat/0\.png"):
        first(image_size=[8, 8])
    (folder / "train" / "cat" / "0.png").write_text("no image either")
    with pytest.raises(DataError, match=r"cat/0\.png"):
        first(image_size=[8, 8])


def segmentation_config(folder, **changes):
    section = {"data_processor": "UNetDataProcessor", "data_dir": str(folder), "batch_size": 2, **changes}
    return SegmentationDataConfig.model_validate(section)


@pytest.fixture
def pairs(tmp_path):
    """Return four gray pictures with labels: a pixel's class is 1 if it is bright."""
    for part in ("image", "label"):
        (tmp_path / part).mkdir()
    for number in range(4):
        image = picture(16, 24, seed=number, channels=1)
        image.save(tmp_path / "image" / f"{number}.png")
        image.point(lambda value: 255 * (value > 127)).save(tmp_path / "label" / f"{number}.png")
    return tmp_path


def test_crops_of_images_and_labels_match(pairs):
    config = segmentation_config(pairs, image_size=[8, 8], normalize_data_method="zero_one")
    samples = open_data(config, UNET, seed=1, repeat=True).samples
    assert len(samples) == 3  # 0.85 of four, rounded
    batch = samples.__getitems__(list(range(12)))
    assert batch["inputs"].shape == (12, 1, 8, 8) and batch["labels"].dtype == torch.int64
    assert torch.equal(batch["labels"], (batch["inputs"][:, 0] > 127.5 / 255).long())
    assert torch.equal(samples.__getitems__([7])["inputs"][0], batch["inputs"][7])
    assert len({each.tobytes() for each in batch["inputs"].numpy()}) == 12


def test_evaluation_images_are_not_augmented(pairs):
    config = segmentation_config(pairs, is_training=False, train_test_split=0.5, batch_size=2)
    (batch,) = open_data(config, UNET, seed=1, repeat=False).create_dataloader()
    image = numbers(Image.open(pairs / "image" / "2.png"))
    torch.testing.assert_close(batch["inputs"][0], (image - image.mean()) / image.std())
    assert torch.equal(batch["labels"][0], (image[0] > 0.5).long())


def test_labels_are_pixel_values(pairs):
    labels = np.arange(16 * 24).reshape(16, 24) % 3
    Image.fromarray(labels.astype(np.uint8)).save(pairs / "label" / "3.png")
    config = segmentation_config(pairs, is_training=False, batch_size=1)
    three = UNET.model_copy(update={"num_classes": 3})
    batch = open_data(config, three, seed=1, repeat=False).samples.__getitems__([0])
    assert torch.equal(batch["labels"][0], torch.from_numpy(labels))
    error = open_data(config, UNET, seed=1, repeat=False).samples.__getitems__([0])
    assert isinstance(error, DataError) and "3.png" in error.where and "set num_classes to 3" in error.remedy


def test_invalid_pairs_are_errors(pairs):
    def first(**changes):
        samples = open_data(segmentation_config(pairs, **changes), UNET, seed=1, repeat=True).samples
        result = samples.__getitems__([0])
        if isinstance(result, DataError):
            raise result
        return result

    with pytest.raises(DataError, match="at least image_size"):
        first(image_size=[32, 8])
    with pytest.raises(DataError, match="no images: 0 of"):
        first(train_test_split=0.0)
    picture(16, 24).save(pairs / "label" / "0.png")
    with pytest.raises(DataError, match="colour image"):
        first()
    Image.new("L", (24, 8)).save(pairs / "label" / "0.png")
    with pytest.raises(DataError, match="pixels"):
        first()
    (pairs / "label" / "0.png").write_text("no image")
    with pytest.raises(DataError, match=r"(?s)cannot read the image.*label/0\.png"):
        first()
    (pairs / "label" / "0.png").unlink()
    with pytest.raises(DataError, match=r"0\.png is in only one of the folders"):
        first()


def test_public_files_load():
    folder = SHARED / "public_params" / "vision" / "vision_transformer" / "configs"
    if not folder.exists():
        pytest.skip("the public params files are not here")
    for path in folder.glob("*.yaml"):
        run = load_params(path)
        assert [each.name for each in run.fit.train_dataloader.transforms][:2] == [
            "resize",
            "random_resized_crop",
        ]
        (validation,) = run.fit.val_dataloader
        assert changed_size(validation) == (3, *run.init.model.image_size)
        size = path.stem.split("_")[2]
        own = load_params(shipped_params()[f"vit/{size}"])
        no_effect = ("attention_softmax_fp32", "use_conv_patchified_embedding")
        assert own.init.model.model_dump(exclude=no_effect) == run.init.model.model_dump(exclude=no_effect)
        assert own.init.schedulers == run.init.schedulers and own.init.optimizer == run.init.optimizer
        assert own.fit.train_dataloader.transforms == run.fit.train_dataloader.transforms
        assert own.fit.train_dataloader.batch_size == run.fit.train_dataloader.batch_size


def test_public_file_of_the_dinov2_classifier_loads():
    path = SHARED / "public_params" / "vision" / "dino" / "configs" / "params_dinov2_large_eval_linear.yaml"
    if not path.exists():
        pytest.skip("the public params files are not here")
    run = load_params(path)
    assert run.init.model.use_dinov2_classifier and run.init.model.freeze == ("^vit_model",)
    for section in (run.fit.train_dataloader, *run.fit.val_dataloader):
        assert changed_size(section) == (3, *run.init.model.image_size)


def changed_size(section):
    return tuple(transform(picture(), section.steps, np.random.default_rng(0)).shape)
