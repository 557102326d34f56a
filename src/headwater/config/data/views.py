"""The schema of several views of each image, for self-supervised learning."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import FilePath, Section
from headwater.config.data.common import LoaderSection
from headwater.config.transforms import (
    Interpolation,
    OccasionalTransform,
    Range,
    Transforms,
    check_ascending,
    check_order,
)

Pixels = Annotated[int, Field(ge=1)]


class ImagenetConfig(Section):
    """Images with a folder for each class: `root`/`split`/CLASS/….

    Attributes:
        root: folder of the images.
        split: subfolder of `root`.
    """

    name: Literal["Imagenet"]
    root: FilePath
    split: str = "train"


class MultiCropConfig(Section):
    """Multi-crop: large (global) and small (local) crops of each image (arXiv:2006.09882, section 3.3).

    Attributes:
        global_num_crops: number of global crops.
        local_num_crops: number of local crops.
        global_image_size: height and width to which global crops are scaled.
        local_image_size: height and width to which local crops are scaled.
        global_crops_scale: smallest and largest area of a global crop, as fractions of the image's area.
        local_crops_scale: smallest and largest area of a local crop, as fractions of the image's area.
        interpolation: interpolation between pixels.
        multicrop_transform_list: transforms of each crop. If a `p` has several numbers, the first ones are
            for the global crops, the others for the local crops.
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
                raise ValueError(
                    f"expected 1 or {parts} values of p for {each.name} in multicrop_transform_list, "
                    f"found {len(each.p)}"
                )
        check_ascending(self, "global_crops_scale", "local_crops_scale")
        return self


class MaskedPatchConfig(Section):
    """The masking of patches of the global crops for the student (arXiv:2106.08254, section 2.3).

    Attributes:
        image_size: height and width of a global crop.
        patch_size: height and width of a patch.
        mask_probability: fraction of the global crops in which patches are masked.
        mask_ratio_tuple: smallest and largest fraction of the patches that are masked in such a crop.
    """

    image_size: Pixels
    patch_size: Pixels
    mask_probability: float = Field(default=0.5, ge=0, le=1)
    mask_ratio_tuple: Range = (0.1, 0.5)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.mask_ratio_tuple
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"expected mask_ratio_tuple to be two ascending numbers from 0 to 1, found [{low}, {high}]"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size ({self.image_size}) is not a multiple of patch_size ({self.patch_size})"
            )
        return self


class Dinov2TransformConfig(Section):
    """The transforms of DINOv2: crops, and masks of patches."""

    name: Literal["Dinov2Transform"]
    multi_crop_transform: MultiCropConfig
    masked_patch_transform: MaskedPatchConfig


class ViewDataConfig(LoaderSection):
    """Several views of each image.

    Attributes:
        dataset: the images.
        ssl_transform: the transforms of each image.
    """

    data_processor: Literal["DinoImageDataProcessor"]
    dataset: ImagenetConfig
    ssl_transform: Dinov2TransformConfig

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        transform = self.ssl_transform
        sizes = transform.multi_crop_transform.global_image_size, transform.masked_patch_transform.image_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                "expected the same sizes in ssl_transform, found "
                f"global_image_size {sizes[0]} and masked_patch_transform.image_size {sizes[1]}"
            )
        return self

    @property
    def place(self) -> str:
        return str(self.dataset.root)
