"""Images with a class for each pixel: files with the same name in two folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from headwater.config.data import SegmentationDataConfig
from headwater.core.errors import DataError
from headwater.data.image.files import is_image, mode_of, read_image
from headwater.data.image.transforms import to_tensor
from headwater.data.loader import Batch
from headwater.data.order import random_generator


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of an image and of its labels: a crop, then quarter turns, then a flip."""

    top: int
    left: int
    height: int
    width: int
    turns: int = 0
    flip: bool = False

    def of(self, pixels: Tensor) -> Tensor:
        """Return the changed pixels [..., h, w]."""
        rows, columns = (
            slice(start, start + size) for start, size in ((self.top, self.height), (self.left, self.width))
        )
        turned = pixels[..., rows, columns].rot90(self.turns, (-2, -1))
        return turned.flip(-1) if self.flip else turned


class SegmentedImages:
    """A data set of images with a class for each pixel.

    A batch has `inputs`, fp32 [batch, channels, h, w], and `labels`, int64 [batch, h, w].

    Args:
        pairs: pairs of an image file and a label file.
        config: section of the params file: crop, augmentation and normalization.
        channels: channels that the model reads.
        num_classes: classes of a pixel; with 1, labels are 0 or 1.
    """

    sequence_length = None

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        config: SegmentationDataConfig,
        *,
        channels: int,
        num_classes: int,
    ) -> None:
        self.pairs = pairs
        self._config, self._mode, self._classes = config, mode_of(channels), max(2, num_classes)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        if len({labels.shape for _, labels in samples}) > 1:
            return DataError(
                "images of one batch have different sizes",
                where=f"data_dir: {self._config.data_dir}",
                remedy="set image_size, so that all images are cropped to the same size",
            )
        images, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(images), "labels": torch.stack(labels)}

    def _sample(self, draw: int) -> tuple[Tensor, Tensor]:
        """Return an image, fp32 [channels, h, w], and the classes of its pixels, int64 [h, w]."""
        image_file, label_file = self.pairs[draw % len(self)]
        image = to_tensor(read_image(image_file, self._mode))
        labels = torch.from_numpy(self._labels(label_file))
        if image.shape[1:] != labels.shape:
            raise DataError(
                f"the image has {list(image.shape[1:])} pixels, but its labels have {list(labels.shape)}",
                where=f"{image_file} and {label_file}",
                remedy="correct or remove one of them",
            )
        change = self._change(image_file, labels.shape, draw)
        # Normalized before the crop, because `standard_score` uses mean and deviation of the whole image.
        return change.of(self._normalized(image)), change.of(labels)

    def _change(self, file: Path, shape: Sequence[int], draw: int) -> _Change:
        height, width = self._config.image_size or shape
        free = shape[0] - height, shape[1] - width
        if min(free) < 0:
            raise DataError(
                f"expected an image of at least image_size {[height, width]} pixels, got {list(shape)}",
                where=str(file),
                remedy="use a smaller image_size",
            )
        if not self._config.augments:
            return _Change(free[0] // 2, free[1] // 2, height, width)
        generator = random_generator(self._config.shuffle_seed or 0, "image", draw)
        top, left = (int(generator.integers(pixels + 1)) for pixels in free)
        turns, flip = int(generator.integers(4)), bool(generator.integers(2))
        # A crop that is not square is only turned by 180 degrees: a turn by 90 degrees would swap its sides.
        return _Change(top, left, height, width, turns if height == width else turns // 2 * 2, flip)

    def _normalized(self, image: Tensor) -> Tensor:
        match self._config.normalize_data_method:
            case "zero_one":
                return image
            case "zero_centered":
                return 2 * image - 1
            case "standard_score":
                deviation, mean = torch.std_mean(image)
                return (image - mean) / deviation.clamp_min(1e-6)

    def _labels(self, path: Path) -> npt.NDArray[np.int64]:
        """Return the classes [h, w]: 0 and 1 for a black and white image, otherwise the pixel values."""
        # The pixels are not converted: a conversion would replace the indices of a palette by its colours.
        image = read_image(path)
        if image.mode not in ("1", "L", "P"):
            raise DataError(
                f"expected a label image with one channel, got a colour image ({image.mode})",
                where=str(path),
                remedy="store the labels in black and white, or with the number of the class as pixel value",
            )
        return self._classes_of(image, path)

    def _classes_of(self, image: Image.Image, path: Path) -> npt.NDArray[np.int64]:
        labels = np.array(image, dtype=np.int64)
        if self._classes == 2 and np.isin(labels, (0, 255)).all():
            return labels // 255
        if labels.max(initial=0) >= self._classes:
            raise DataError(
                f"expected classes below {self._classes}, the model's number of classes; got {labels.max()}",
                where=str(path),
                remedy=f"set num_classes to {labels.max() + 1} or more",
            )
        return labels


def read_segmented_images(
    config: SegmentationDataConfig, *, channels: int, num_classes: int
) -> SegmentedImages:
    """Return the data set that a section of a params file describes.

    Args:
        config: the section.
        channels: channels that the model reads.
        num_classes: classes of a pixel.

    Raises:
        DataError: if the split is empty, or an image lacks its label file, or a label file its image.
    """
    images, labels = (_files(config.data_dir / part) for part in ("image", "label"))
    if alone := sorted(images.keys() ^ labels.keys()):
        raise DataError(
            f"{alone[0]} is in only one of the folders image and label",
            where=f"data_dir: {config.data_dir}",
            remedy="add the missing file under the same name, or remove this one",
        )
    names = sorted(images)
    border = round(len(names) * config.train_test_split)
    chosen = names[:border] if config.is_training else names[border:]
    if not chosen:
        raise DataError(
            f"this split has no images: 0 of {len(names)} with train_test_split={config.train_test_split}",
            where=f"data_dir: {config.data_dir}",
            remedy="change train_test_split, or set data_dir to a folder that holds folders image and label",
        )
    pairs = [(images[name], labels[name]) for name in chosen]
    return SegmentedImages(pairs, config, channels=channels, num_classes=num_classes)


def _files(folder: Path) -> dict[str, Path]:
    """Return the image files in a folder by name."""
    return {path.name: path for path in folder.iterdir() if is_image(path)} if folder.is_dir() else {}
