"""The schema of the `transforms` of an image loader: a class for each, selected by its name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, OneOrMore, Section

Pixels = Annotated[int, Field(ge=1)]
SizeInPixels = Annotated[tuple[Pixels, ...], Field(min_length=1, max_length=2), OneOrMore]
"""Height and width; a single number stands for both."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Range = Annotated[tuple[float, float], AsTuple]
Probability = Annotated[float, Field(ge=0, le=1)]
PerChannel = Annotated[tuple[float, ...], Field(min_length=1), AsTuple]


def check_ascending(section: Section, *keys: str) -> None:
    """Raise ValueError unless the values of these keys are two ascending numbers > 0 each."""
    for key in keys:
        low, high = getattr(section, key)
        if not 0 < low <= high:
            raise ValueError(f"expected {key} to be two ascending numbers > 0, found [{low}, {high}]")


class SizedTransform(Section):
    """The keys of a transform that has a size.

    Attributes:
        size: height and width, or one number for both.
    """

    size: SizeInPixels

    @property
    def height_and_width(self) -> tuple[int, int]:
        return self.size[0], self.size[-1]


class ResizeConfig(SizedTransform):
    """A transform that scales the image.

    Attributes:
        size: height and width; a single number is the shorter side, and the aspect ratio is kept.
        interpolation: interpolation between pixels.
    """

    name: Literal["resize"]
    interpolation: Interpolation = "bilinear"


class ExpandToSquareConfig(Section):
    """A transform that pads the image equally on two sides to a square (arXiv:2310.03744, section A.2).

    Attributes:
        background_color: colour of the margins, a number from 0 to 255 for each channel.
    """

    name: Literal["expand_to_square"]
    background_color: Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(min_length=1), AsTuple]


class CenterCropConfig(SizedTransform):
    """A transform that crops the centre of the image. Pixels outside the image are black."""

    name: Literal["center_crop"]


class RandomCropConfig(SizedTransform):
    """A transform that crops the image at a random position.

    Attributes:
        padding: number of black pixels that are first added on each side.
    """

    name: Literal["random_crop"]
    padding: int = Field(default=0, ge=0)


class RandomResizedCropConfig(SizedTransform):
    """A transform that crops a part of random area and shape and scales it (arXiv:1409.4842, section 6).

    Attributes:
        scale: smallest and largest fraction of the image's area.
        ratio: smallest and largest ratio of width to height.
        interpolation: interpolation between pixels.
    """

    name: Literal["random_resized_crop"]
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        check_ascending(self, "scale", "ratio")
        return self


class RandomHorizontalFlipConfig(Section):
    """A transform that randomly flips the image horizontally.

    Attributes:
        p: probability of the flip.
    """

    name: Literal["random_horizontal_flip"]
    p: Probability = 0.5


class RandomVerticalFlipConfig(Section):
    """A transform that randomly flips the image vertically.

    Attributes:
        p: probability of the flip.
    """

    name: Literal["random_vertical_flip"]
    p: Probability = 0.5


PerCrop = Annotated[tuple[Probability, ...], Field(min_length=1), OneOrMore]
"""Probability of a transform: a number for all crops of an image, or one for each crop."""


class OccasionalTransform(Section):
    """A transform that is applied with a probability.

    Attributes:
        p: probability of the transform: a number for all crops of an image, or one for each crop.
    """

    p: PerCrop = (1.0,)


class ColorJitterConfig(OccasionalTransform):
    """A transform that changes brightness, contrast, saturation and hue in random order (arXiv:1312.5402).

    Attributes:
        brightness: largest deviation of the factor on the brightness from 1.
        contrast: the same for the contrast.
        saturation: the same for the saturation.
        hue: largest rotation of the hue, as a fraction of the colour circle.
    """

    name: Literal["color_jitter_with_prob"]
    brightness: float = Field(default=0.0, ge=0)
    contrast: float = Field(default=0.0, ge=0)
    saturation: float = Field(default=0.0, ge=0)
    hue: float = Field(default=0.0, ge=0, le=0.5)


class RandomGrayScaleConfig(OccasionalTransform):
    """A transform that converts the image to gray."""

    name: Literal["random_gray_scale"]


class RandomGaussianBlurConfig(OccasionalTransform):
    """A transform that blurs the image with a Gaussian of random radius.

    Attributes:
        radius_min: smallest standard deviation, in pixels.
        radius_max: largest standard deviation, in pixels.
    """

    name: Literal["random_gaussian_blur_random_radius"]
    radius_min: float = Field(default=0.1, ge=0)
    radius_max: float = Field(default=2.0, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.radius_min > self.radius_max:
            raise ValueError(
                f"expected radius_min <= radius_max, found {self.radius_min} and {self.radius_max}"
            )
        return self


class RandomSolarizeConfig(OccasionalTransform):
    """A transform that inverts bright pixels.

    Attributes:
        threshold: smallest pixel value that is inverted, 0 to 256.
    """

    name: Literal["random_solarize"]
    threshold: int = Field(default=128, ge=0, le=256)


class ToTensorConfig(Section):
    """A transform that converts an image to a tensor [channels, height, width] of values from 0 to 1."""

    name: Literal["to_tensor"]


class NormalizeConfig(Section):
    """A transform that subtracts a mean from each channel and divides by a standard deviation.

    Attributes:
        mean: mean of each channel, or one number for all.
        std: standard deviation of each channel, or one number for all.
    """

    name: Literal["normalize"]
    mean: PerChannel
    std: PerChannel

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if 0 in self.std:
            raise ValueError(f"expected std > 0 for every channel, found {list(self.std)}")
        return self


ImageTransform = (
    ExpandToSquareConfig
    | ResizeConfig
    | CenterCropConfig
    | RandomCropConfig
    | RandomResizedCropConfig
    | RandomHorizontalFlipConfig
    | RandomVerticalFlipConfig
    | ColorJitterConfig
    | RandomGrayScaleConfig
    | RandomGaussianBlurConfig
    | RandomSolarizeConfig
)
"""The transforms of images."""

AnyTransform = Annotated[ImageTransform | ToTensorConfig | NormalizeConfig, Field(discriminator="name")]

Transforms = Annotated[tuple[AnyTransform, ...], AsTuple]


def check_order(transforms: Transforms) -> None:
    """Check that `to_tensor` occurs once, after all transforms of images and before `normalize`.

    Raises:
        ValueError: if `to_tensor` is missing, occurs twice or is at another place.
    """
    names = [each.name for each in transforms]
    if names.count("to_tensor") != 1:
        raise ValueError(f"expected to_tensor once in transforms, found it {names.count('to_tensor')} times")
    place = names.index("to_tensor")
    for number, name in enumerate(names):
        if name == "normalize" and number < place:
            raise ValueError("in transforms, normalize must come after to_tensor")
        if name not in ("normalize", "to_tensor") and number > place:
            raise ValueError(f"in transforms, {name} must come before to_tensor")
