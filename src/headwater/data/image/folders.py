"""Images in one folder per class, as in ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headwater.config.data import ImageFolderDataConfig
from headwater.config.transforms import Transforms
from headwater.core.errors import DataError
from headwater.data.image.classes import find_classes
from headwater.data.image.files import is_image, mode_of, read_image
from headwater.data.image.transforms import transform
from headwater.data.loader import Batch
from headwater.data.order import random_generator


class LabelledImages:
    """A data set of images with one class each.

    A batch has `inputs`, fp32 [batch, channels, h, w], and `labels`, int64 [batch].

    Args:
        files: image files.
        labels: class of each file.
        transforms: transforms of an image, in order.
        channels: channels that the model reads.
        seed: seed of the random transforms.
    """

    sequence_length = None

    def __init__(
        self,
        files: Sequence[Path],
        labels: Sequence[int],
        transforms: Transforms,
        *,
        channels: int,
        seed: int,
    ) -> None:
        self.files = files
        self.labels = np.asarray(labels, dtype=np.int64)
        self._transforms, self._mode, self._seed = transforms, mode_of(channels), seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            images = [self._image(draw) for draw in draws]
        except DataError as error:
            return error
        if len({image.shape for image in images}) > 1:
            return DataError(
                "images of one batch have different sizes",
                where="transforms",
                remedy="add a resize or crop, so that all images have the same size",
            )
        labels = self.labels[[draw % len(self) for draw in draws]]
        return {"inputs": torch.stack(images), "labels": torch.from_numpy(labels)}

    def _image(self, draw: int) -> torch.Tensor:
        generator = random_generator(self._seed, "image", draw)
        image = read_image(self.files[draw % len(self)], self._mode)
        return transform(image, self._transforms, generator)


def read_image_folders(config: ImageFolderDataConfig, *, channels: int, num_classes: int) -> LabelledImages:
    """Return the data set that a section of a params file describes; classes follow the order of folders.

    Args:
        config: the section.
        channels: channels that the model reads.
        num_classes: classes of the model.

    Raises:
        DataError: if no image is found, or the folders have more classes than the model.
    """
    files, labels = find_classes(config.data_dir / config.split, is_image, num_classes)
    return LabelledImages(files, labels, config.steps, channels=channels, seed=config.shuffle_seed or 0)
