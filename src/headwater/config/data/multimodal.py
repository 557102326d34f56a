"""Data of texts with images."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect
from headwater.config.data.common import Folders, LoaderSection
from headwater.config.transforms import Transforms, check_order

_AsPrepared = Annotated[Any, NoEffect("texts are read as they were prepared")]


class ImageTextDataConfig(LoaderSection):
    """Texts with images in HDF5 files, and the images in files of their own.

    Attributes:
        data_processor: the first has an image at the same place in all samples, `image_start_idx` of the
            model, where the files do not say another; the second says it in the files.
        data_dir: folders with HDF5 files.
        img_data_dir: folder below which the images are.
        image_data_size: channels, height and width of the images after the transforms; beside the model's.
        transforms: what is done to each image, in this order.
    """

    data_processor: Literal["LlavaHDF5MapDataProcessor", "MultimodalSimpleHDF5MapDataProcessor"]
    data_dir: Folders
    img_data_dir: FilePath
    image_data_size: Annotated[tuple[int, int, int] | None, AsTuple] = None
    transforms: Annotated[Transforms, Field(min_length=1)]
    max_num_img: Annotated[Any, NoEffect("the files say it")] = None
    num_patches: Annotated[Any, NoEffect("the model's holds")] = None
    bos_token_id: _AsPrepared = None
    pad_token_id: _AsPrepared = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        check_order(self.transforms)
        return self
