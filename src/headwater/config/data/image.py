"""Data of images."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect
from headwater.config.data.common import Folders, LoaderSection
from headwater.config.transforms import ResizeConfig, ToTensorConfig, Transforms, check_order

_Encoded = Annotated[Any, NoEffect("the images are encoded already")]
_ModelHolds = Annotated[Any, NoEffect("the model's holds")]


class MNISTDataConfig(LoaderSection):
    """Handwritten digits in the IDX files of MNIST, compressed or not.

    Attributes:
        data_dir: folder with the files.
        split: `train`, or `val`: the test set.
        drop_last_batch: another name of `drop_last`.
        to_float16: pixels are fp32 here, and precision decides what becomes of them.
    """

    data_processor: Literal["MNISTDataProcessor"]
    data_dir: FilePath
    split: Literal["train", "val"] = "train"
    drop_last_batch: bool | None = None
    to_float16: Annotated[bool, NoEffect("the precision of the run holds")] = False

    @property
    def leaves_out_last(self) -> bool:
        return self.drop_last if self.drop_last_batch is None else self.drop_last_batch


class ImageFolderDataConfig(LoaderSection):
    """Images in a folder for each class: `data_dir`/`split`/CLASS/….

    Attributes:
        data_dir: the folder.
        split: folder in it.
        image_size: height and width to which images are scaled where there are no transforms; beside the
            model's.
        num_classes: beside the model's.
        transforms: what is done to each image, in this order.
    """

    data_processor: Literal["ImageNet1KProcessor"]
    data_dir: FilePath
    split: str = "train"
    image_size: Annotated[tuple[int, int], AsTuple] | None = None
    num_classes: Annotated[int | None, Field(ge=1)] = None
    transforms: Transforms = ()
    patch_size: _ModelHolds = None
    max_sequence_length: _ModelHolds = None
    image_channels: _ModelHolds = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.transforms:
            check_order(self.transforms)
        return self

    @property
    def steps(self) -> Transforms:
        """What is done to each image."""
        resize = () if self.image_size is None else (ResizeConfig(name="resize", size=self.image_size),)
        return self.transforms or (*resize, ToTensorConfig(name="to_tensor"))


class SegmentationDataConfig(LoaderSection):
    """Images with a class for each pixel: equally named files in `data_dir`/image and `data_dir`/label.

    Attributes:
        data_dir: the folder.
        train_test_split: share of the files to train on, the first ones in the order of their names.
        is_training: those; otherwise the rest.
        image_size: height and width of the parts that are cut out; whole images where absent.
        augment_data: cut anywhere, turn by quarters and mirror at random when training; otherwise cut the
            middle out.
        normalize_data_method: numbers between 0 and 1, between -1 and 1, or of mean 0 and deviation 1 in
            each image.
    """

    data_processor: Literal["UNetDataProcessor"]
    data_dir: FilePath
    train_test_split: float = Field(default=0.85, ge=0, le=1)
    is_training: bool = True
    image_size: Annotated[tuple[int, int], AsTuple] | None = None
    augment_data: bool = True
    normalize_data_method: Literal["zero_one", "zero_centered", "standard_score"] = "standard_score"

    @property
    def augments(self) -> bool:
        """Whether parts are random."""
        return self.is_training and self.augment_data


class LatentDataConfig(LoaderSection):
    """Images that an autoencoder has encoded, in a folder for each class: `data_dir`/`split`/CLASS/….npz.

    A file's `vae_output` [2 * channels, h, w] has means and logarithms of variances, from which a latent is
    drawn anew in each pass.

    Attributes:
        data_dir: folders with the same images, for example one with all of them mirrored; which of them a
            sample is read from is random.
        split: folder in it.
        num_classes: beside the model's.
    """

    data_processor: Literal["DiffusionLatentImageNet1KProcessor"]
    data_dir: Folders
    split: str = "train"
    num_classes: Annotated[int | None, Field(ge=1)] = None
    num_diffusion_steps: _ModelHolds = None
    image_size: _Encoded = None
    image_channels: _Encoded = None
