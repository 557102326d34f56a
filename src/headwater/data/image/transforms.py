"""Image transforms; all random choices come from the generator that is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from headwater.config.transforms import (
    AnyTransform,
    CenterCropConfig,
    ColorJitterConfig,
    ExpandToSquareConfig,
    ImageTransform,
    Interpolation,
    NormalizeConfig,
    OccasionalTransform,
    RandomCropConfig,
    RandomGaussianBlurConfig,
    RandomGrayScaleConfig,
    RandomHorizontalFlipConfig,
    RandomResizedCropConfig,
    RandomSolarizeConfig,
    RandomVerticalFlipConfig,
    ResizeConfig,
    ToTensorConfig,
)

_FILTERS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_ATTEMPTS = 10
"""Maximum attempts to draw a random crop that fits into the image."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


def transform(
    image: Image.Image,
    transforms: Sequence[AnyTransform],
    generator: np.random.Generator,
    *,
    part: int = 0,
) -> Tensor:
    """Apply transforms to an image and return it as a tensor, fp32 [channels, h, w].

    Args:
        image: image with the channels that the model reads.
        transforms: transforms in order; one of them is `to_tensor`.
        generator: source of all random choices.
        part: index of this view of the image, for transforms with a list of probabilities, one per view.
    """
    numbers = torch.empty(0)
    for each in transforms:
        if isinstance(each, ToTensorConfig):
            numbers = to_tensor(image)
        elif isinstance(each, NormalizeConfig):
            mean, std = (torch.tensor(values)[:, None, None] for values in (each.mean, each.std))
            numbers = (numbers - mean) / std
        elif not isinstance(each, OccasionalTransform) or generator.random() < each.p[part % len(each.p)]:
            image = _changed(image, each, generator)
    return numbers


def to_tensor(image: Image.Image) -> Tensor:
    """Return the pixels as numbers in [0, 1], fp32 [channels, h, w]."""
    # `np.array` copies the pixels: Pillow shares its memory read-only, which torch does not support.
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels.view(image.height, image.width, -1).permute(2, 0, 1).float() / 255


def _changed(image: Image.Image, change: ImageTransform, generator: np.random.Generator) -> Image.Image:
    match change:
        case ResizeConfig():
            return _resized(image, change)
        case ExpandToSquareConfig():
            return _square(image, change.background_color)
        case CenterCropConfig():
            return image.crop(_centre(image, *change.height_and_width))
        case RandomCropConfig():
            return image.crop(_anywhere(image, *change.height_and_width, change.padding, generator))
        case RandomResizedCropConfig():
            height, width = change.height_and_width
            return image.resize(
                (width, height), _FILTERS[change.interpolation], box=_random_box(image, change, generator)
            )
        case RandomHorizontalFlipConfig():
            flip = generator.random() < change.p
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image
        case RandomVerticalFlipConfig():
            flip = generator.random() < change.p
            return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if flip else image
        case ColorJitterConfig():
            return _jittered(image, change, generator)
        case RandomGrayScaleConfig():
            return image.convert("L").convert(image.mode)
        case RandomGaussianBlurConfig():
            radius = generator.uniform(change.radius_min, change.radius_max)
            return image.filter(ImageFilter.GaussianBlur(radius))
        case RandomSolarizeConfig():
            return ImageOps.solarize(image, change.threshold)


def _jittered(image: Image.Image, config: ColorJitterConfig, generator: np.random.Generator) -> Image.Image:
    factors = {
        ImageEnhance.Brightness: config.brightness,
        ImageEnhance.Contrast: config.contrast,
        ImageEnhance.Color: config.saturation,
    }
    changes = [
        (kind, generator.uniform(max(0.0, 1 - most), 1 + most)) for kind, most in factors.items() if most
    ]
    turn = generator.uniform(-config.hue, config.hue)
    for number in generator.permutation(len(changes) + 1):
        if number == len(changes):
            image = _other_hue(image, turn)
        else:
            kind, factor = changes[number]
            image = kind(image).enhance(factor)
    return image


def _other_hue(image: Image.Image, turn: float) -> Image.Image:
    """Return the image with its hue rotated by `turn` of the colour circle (1: once around)."""
    if image.mode != "RGB" or not turn:
        return image
    hue, *others = image.convert("HSV").split()
    turned = hue.point(lambda value: (value + round(turn * 256)) % 256)
    return Image.merge("HSV", (turned, *others)).convert("RGB")


def _resized(image: Image.Image, config: ResizeConfig) -> Image.Image:
    height, width = config.height_and_width
    if len(config.size) == 1:
        short = min(image.width, image.height)
        width, height = image.width * width // short, image.height * height // short
    return image.resize((width, height), _FILTERS[config.interpolation])


def _square(image: Image.Image, color: tuple[int, ...]) -> Image.Image:
    side = max(image.size)
    square = Image.new(image.mode, (side, side), color if len(color) > 1 else color[0])
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _centre(image: Image.Image, height: int, width: int) -> Box:
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return left, top, left + width, top + height


def _anywhere(
    image: Image.Image, height: int, width: int, padding: int, generator: np.random.Generator
) -> Box:
    left = int(generator.integers(max(0, image.width + 2 * padding - width) + 1)) - padding
    top = int(generator.integers(max(0, image.height + 2 * padding - height) + 1)) - padding
    return left, top, left + width, top + height


def _random_box(image: Image.Image, config: RandomResizedCropConfig, generator: np.random.Generator) -> Box:
    """Return a random box. Its aspect ratio is drawn on a log scale, so 1:2 is as likely as 2:1."""
    low, high = config.ratio
    for _ in range(_ATTEMPTS):
        area = image.width * image.height * generator.uniform(*config.scale)
        ratio = math.exp(generator.uniform(math.log(low), math.log(high)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            return _anywhere(image, height, width, 0, generator)
    # No random box has fitted into the image, so take the largest centred one with an allowed aspect ratio.
    width = min(image.width, max(1, round(image.height * high)))
    height = min(image.height, max(1, round(image.width / low)))
    return _centre(image, height, width)
