"""Data of several views of each image, for models that learn without labels."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import FilePath, Section
from headwater.config.data.common import LoaderSection
from headwater.config.transforms import Interpolation, OccasionalTransform, Range, Transforms, check_order

Pixels = Annotated[int, Field(ge=1)]


class ImagenetConfig(Section):
    """Images in a folder for each class: `root`/`split`/CLASS/….

    Attributes:
        root: the folder.
        split: folder in it.
    """

    name: Literal["Imagenet"]
    root: FilePath
    split: str = "train"


class MultiCropConfig(Section):
    """Parts of each image: large ones, and small ones (arXiv:2006.09882, section 3.3).

    Attributes:
        global_num_crops: large parts.
        local_num_crops: small parts.
        global_image_size: height and width to which the large ones are scaled.
        local_image_size: likewise the small ones.
        global_crops_scale: least and largest share of the image's area.
        local_crops_scale: likewise of the small ones.
        interpolation: between pixels.
        multicrop_transform_list: what is done to each part; where `p` has several numbers, they are those of
            the large parts and then those of the small ones.
    """

    global_num_crops: int = Field(default=2, ge=2)
    local_num_crops: int = Field(default=8, ge=1)
    global_image_size: Pixels = 224
    local_image_size: Pixels = 96
    global_crops_scale: Range = (0.32, 1.0)
    local_crops_scale: Range = (0.05, 0.32)
    interpolation: Interpolation = "bicubic"
    multicrop_transform_list: Transforms

    @model_validator(mode="after")
    def _transforms(self) -> Self:
        check_order(self.multicrop_transform_list)
        parts = self.global_num_crops + self.local_num_crops
        for each in self.multicrop_transform_list:
            if isinstance(each, OccasionalTransform) and len(each.p) not in (1, parts):
                raise ValueError(f"{each.name} has {len(each.p)} values of p: write one, or {parts}")
        for low, high in (self.global_crops_scale, self.local_crops_scale):
            if not 0 < low <= high:
                raise ValueError(f"a scale is [{low}, {high}]: write two numbers above 0, the smaller first")
        return self


class MaskedPatchConfig(Section):
    """Which patches of the large parts the student does not see (arXiv:2106.08254, section 2.3).

    Attributes:
        image_size: of the large parts.
        patch_size: of a patch.
        mask_probability: share of the parts of which patches are masked.
        mask_ratio_tuple: least and largest share of the patches that are masked there.
    """

    image_size: Pixels
    patch_size: Pixels
    mask_probability: float = Field(default=0.5, ge=0, le=1)
    mask_ratio_tuple: Range = (0.1, 0.5)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.mask_ratio_tuple
        if not 0 <= low <= high <= 1:
            raise ValueError(f"mask_ratio_tuple is [{low}, {high}]: write two shares, the smaller first")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size ({self.image_size}) is not a multiple of patch_size ({self.patch_size})"
            )
        return self


class Dinov2TransformConfig(Section):
    """What becomes of an image."""

    name: Literal["Dinov2Transform"]
    multi_crop_transform: MultiCropConfig
    masked_patch_transform: MaskedPatchConfig


class ViewDataConfig(LoaderSection):
    """Several views of each image.

    Attributes:
        dataset: the images.
        ssl_transform: what becomes of each.
    """

    data_processor: Literal["DinoImageDataProcessor"]
    dataset: ImagenetConfig
    ssl_transform: Dinov2TransformConfig

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        transform = self.ssl_transform
        sizes = transform.multi_crop_transform.global_image_size, transform.masked_patch_transform.image_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"global_image_size is {sizes[0]}, masked_patch_transform.image_size {sizes[1]}")
        return self

    @property
    def place(self) -> str:
        return str(self.dataset.root)
