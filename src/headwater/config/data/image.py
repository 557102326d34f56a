"""The schema of image data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect
from headwater.config.data.common import Folders, FromModel, LoaderSection
from headwater.config.transforms import ResizeConfig, ToTensorConfig, Transforms, check_order

_Encoded = Annotated[Any, NoEffect("the images are already encoded")]


class MNISTDataConfig(LoaderSection):
    """Handwritten digits in the IDX files of MNIST, compressed or not.

    Attributes:
        data_dir: folder with the files.
        split: `train`, or `val` for the test set.
        drop_last_batch: another name of `drop_last`.
    """

    data_processor: Literal["MNISTDataProcessor"]
    data_dir: FilePath
    split: Literal["train", "val"] = "train"
    drop_last_batch: bool | None = None
    to_float16: Annotated[bool, NoEffect("the precision of the run is used")] = False

    @property
    def leaves_out_last(self) -> bool:
        return self.drop_last if self.drop_last_batch is None else self.drop_last_batch


class ImageFolderDataConfig(LoaderSection):
    """Images with a folder for each class: `data_dir`/`split`/CLASS/….

    Attributes:
        data_dir: folder of the images.
        split: subfolder of `data_dir`.
        image_size: height and width of the model's images; without `transforms`, images are scaled to it.
        num_classes: number of classes; must be that of the model.
        transforms: transforms of each image, in this order.
    """

    data_processor: Literal["ImageNet1KProcessor"]
    data_dir: FilePath
    split: str = "train"
    image_size: Annotated[tuple[int, int], AsTuple] | None = None
    num_classes: Annotated[int | None, Field(ge=1)] = None
    transforms: Transforms = ()
    patch_size: FromModel = None
    max_sequence_length: FromModel = None
    image_channels: FromModel = None

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.transforms:
            check_order(self.transforms)
        return self

    @property
    def steps(self) -> Transforms:
        """The transforms of each image; by default those that follow from `image_size`."""
        resize = () if self.image_size is None else (ResizeConfig(name="resize", size=self.image_size),)
        return self.transforms or (*resize, ToTensorConfig(name="to_tensor"))


class SegmentationDataConfig(LoaderSection):
    """Images with a class for each pixel: files with the same names in `data_dir`/image and `data_dir`/label.

    Attributes:
        data_dir: folder with the subfolders `image` and `label`.
        train_test_split: fraction of the files for training, the first ones in the order of their names.
        is_training: true for the training files, false for the other ones.
        image_size: height and width of the crops; whole images if absent.
        augment_data: in training, use random crops, random rotations by multiples of 90° and random flips;
            otherwise use the centre crop.
        normalize_data_method: range of the pixels: `zero_one` from 0 to 1, `zero_centered` from -1 to 1,
            `standard_score` with mean 0 and standard deviation 1 in each image.
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
        """True if crops are random."""
        return self.is_training and self.augment_data


class LatentDataConfig(LoaderSection):
    """Images encoded by an autoencoder, with a folder for each class: `data_dir`/`split`/CLASS/….npz.

    `vae_output` [2 * channels, height, width] in a file has means and logarithms of variances. In each pass a
    latent is sampled from this distribution.

    Attributes:
        data_dir: one or several folders with the same images, for example a second one with flipped images.
            Each sample is read from a randomly chosen folder.
        split: subfolder of `data_dir`.
        num_classes: number of classes; must be that of the model.
    """

    data_processor: Literal["DiffusionLatentImageNet1KProcessor"]
    data_dir: Folders
    split: str = "train"
    num_classes: Annotated[int | None, Field(ge=1)] = None
    num_diffusion_steps: FromModel = None
    image_size: _Encoded = None
    image_channels: _Encoded = None
