"""What the `transforms` of an image loader's section may say: one class each, found by its name."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, OneOrMore, Section

Pixels = Annotated[int, Field(ge=1)]
SizeInPixels = Annotated[tuple[Pixels, ...], Field(min_length=1, max_length=2), OneOrMore]
"""Height and width; a single number is both."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Range = Annotated[tuple[float, float], AsTuple]
Probability = Annotated[float, Field(ge=0, le=1)]
PerChannel = Annotated[tuple[float, ...], Field(min_length=1), AsTuple]


class SizedTransform(Section):
    """A transform with a size.

    Attributes:
        size: height and width, or one number for both.
    """

    size: SizeInPixels

    @property
    def height_and_width(self) -> tuple[int, int]:
        return self.size[0], self.size[-1]


class ResizeConfig(SizedTransform):
    """Scales the image.

    Attributes:
        size: height and width; one number is the shorter side, and the other follows.
        interpolation: between pixels.
    """

    name: Literal["resize"]
    interpolation: Interpolation = "bilinear"


class ExpandToSquareConfig(Section):
    """Adds equal margins to the shorter sides, so that the image is square (arXiv:2310.03744, section A.2).

    Attributes:
        background_color: of the margins, a number up to 255 for each channel.
    """

    name: Literal["expand_to_square"]
    background_color: Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(min_length=1), AsTuple]


class CenterCropConfig(SizedTransform):
    """Cuts the middle out; what is outside the image is black."""

    name: Literal["center_crop"]


class RandomCropConfig(SizedTransform):
    """Cuts a part out, anywhere.

    Attributes:
        padding: black pixels that are added on each side first.
    """

    name: Literal["random_crop"]
    padding: int = Field(default=0, ge=0)


class RandomResizedCropConfig(SizedTransform):
    """Cuts a part of random area and shape out and scales it (arXiv:1409.4842, section 6).

    Attributes:
        scale: least and largest share of the image's area.
        ratio: least and largest width over height.
        interpolation: between pixels.
    """

    name: Literal["random_resized_crop"]
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for key, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ValueError(f"{key} is [{low}, {high}]: write two numbers above 0, the smaller first")
        return self


class RandomHorizontalFlipConfig(Section):
    """Mirrors left and right.

    Attributes:
        p: how often.
    """

    name: Literal["random_horizontal_flip"]
    p: Probability = 0.5


class RandomVerticalFlipConfig(Section):
    """Mirrors top and bottom.

    Attributes:
        p: how often.
    """

    name: Literal["random_vertical_flip"]
    p: Probability = 0.5


PerCrop = Annotated[tuple[Probability, ...], Field(min_length=1), OneOrMore]
"""How often something is done: one number for all parts of an image, or one for each."""


class OccasionalTransform(Section):
    """A transform that is not always done.

    Attributes:
        p: how often; one number, or one for each part that is cut out of an image.
    """

    p: PerCrop = (1.0,)


class ColorJitterConfig(OccasionalTransform):
    """Changes brightness, contrast, saturation and hue, in a random order (arXiv:1312.5402, section 2).

    Attributes:
        brightness: by this factor below or above 1 at most.
        contrast: likewise.
        saturation: likewise.
        hue: by this share of the circle of colours at most.
    """

    name: Literal["color_jitter_with_prob"]
    brightness: float = Field(default=0.0, ge=0)
    contrast: float = Field(default=0.0, ge=0)
    saturation: float = Field(default=0.0, ge=0)
    hue: float = Field(default=0.0, ge=0, le=0.5)


class RandomGrayScaleConfig(OccasionalTransform):
    """Takes the colours away."""

    name: Literal["random_gray_scale"]


class RandomGaussianBlurConfig(OccasionalTransform):
    """Blurs.

    Attributes:
        radius_min: least standard deviation in pixels.
        radius_max: largest.
    """

    name: Literal["random_gaussian_blur_random_radius"]
    radius_min: float = Field(default=0.1, ge=0)
    radius_max: float = Field(default=2.0, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.radius_min > self.radius_max:
            raise ValueError(f"radius_min ({self.radius_min}) is above radius_max ({self.radius_max})")
        return self


class RandomSolarizeConfig(OccasionalTransform):
    """Turns the brightness of bright pixels round.

    Attributes:
        threshold: from this brightness on, of 256.
    """

    name: Literal["random_solarize"]
    threshold: int = Field(default=128, ge=0, le=256)


class ToTensorConfig(Section):
    """From an image to numbers between 0 and 1, [channels, h, w]."""

    name: Literal["to_tensor"]


class NormalizeConfig(Section):
    """Takes a mean off each channel and divides by a deviation.

    Attributes:
        mean: of each channel, or one for all.
        std: likewise.
    """

    name: Literal["normalize"]
    mean: PerChannel
    std: PerChannel

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if 0 in self.std:
            raise ValueError("std is 0 for a channel: it is what the channel is divided by")
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
"""Those that take an image."""

AnyTransform = Annotated[ImageTransform | ToTensorConfig | NormalizeConfig, Field(discriminator="name")]

Transforms = Annotated[tuple[AnyTransform, ...], AsTuple]


def check_order(transforms: Transforms) -> None:
    """Check that images become numbers once, and that each transform gets what it takes.

    Raises:
        ValueError: if not.
    """
    names = [each.name for each in transforms]
    if names.count("to_tensor") != 1:
        raise ValueError("transforms need to_tensor, once")
    place = names.index("to_tensor")
    for number, name in enumerate(names):
        if name == "normalize" and number < place:
            raise ValueError("normalize comes after to_tensor")
        if name not in ("normalize", "to_tensor") and number > place:
            raise ValueError(f"{name} comes before to_tensor")
