"""The schema of texts with images."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect
from headwater.config.data.common import Folders, FromModel, LoaderSection
from headwater.config.transforms import Transforms, check_order

_AsPrepared = Annotated[Any, NoEffect("it was applied when the texts were prepared")]


class ImageTextDataConfig(LoaderSection):
    """Texts in HDF5 files, and their images in image files.

    Attributes:
        data_processor: with `LlavaHDF5MapDataProcessor`, the image is at `image_start_idx` of the model in
            all samples, unless the files contain its place. With `MultimodalSimpleHDF5MapDataProcessor`, the
            files contain the places of the images.
        data_dir: folders with HDF5 files.
        img_data_dir: folder of the images.
        image_data_size: channels, height and width of the images after the transforms; must be those of the
            model.
        transforms: transforms of each image, in this order.
    """

    data_processor: Literal["LlavaHDF5MapDataProcessor", "MultimodalSimpleHDF5MapDataProcessor"]
    data_dir: Folders
    img_data_dir: FilePath
    image_data_size: Annotated[tuple[int, int, int] | None, AsTuple] = None
    transforms: Annotated[Transforms, Field(min_length=1)]
    max_num_img: Annotated[Any, NoEffect("the number in the files is used")] = None
    num_patches: FromModel = None
    bos_token_id: _AsPrepared = None
    pad_token_id: _AsPrepared = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        check_order(self.transforms)
        return self
