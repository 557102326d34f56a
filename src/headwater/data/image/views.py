"""Several views (random crops) of each image, and masks of their patches, for self-supervised learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from headwater.config.data.views import MaskedPatchConfig, MultiCropConfig, ViewDataConfig
from headwater.config.transforms import RandomResizedCropConfig
from headwater.core.errors import DataError
from headwater.data.image.classes import find_classes
from headwater.data.image.files import is_image, mode_of, read_image
from headwater.data.image.transforms import transform
from headwater.data.loader import Batch
from headwater.data.order import random_generator

_LEAST_BLOCK = 4
_LEAST_RATIO = 0.3
"""Minimum number of patches, and minimum aspect ratio, of a masked block (arXiv:2106.08254, algorithm 1)."""

_ATTEMPTS = 10
"""Maximum number of random blocks to try until one masks at least one more patch, and not too many."""


class ImageViews:
    """A data set of views of images.

    A batch has `global_view` and `local_view`, fp32 [batch, views, channels, h, w], and `collated_masks`,
    bool [batch, global views, patches], True for a masked patch.

    Args:
        files: image files.
        config: section of the params file with the transforms.
        channels: channels that the model reads.
    """

    sequence_length = None

    def __init__(self, files: Sequence[Path], config: ViewDataConfig, *, channels: int) -> None:
        self.files = files
        self._transform, self._seed = config.ssl_transform, config.shuffle_seed or 0
        self._mode = mode_of(channels)

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        large, small, masks = zip(*samples, strict=True)
        return {
            "global_view": torch.stack(large),
            "local_view": torch.stack(small),
            "collated_masks": torch.stack(masks),
        }

    def _sample(self, draw: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = random_generator(self._seed, "image", draw)
        image = read_image(self.files[draw % len(self)], self._mode)
        crops = self._transform.multi_crop_transform
        views = [
            self._view(image, crops, number, generator)
            for number in range(crops.global_num_crops + crops.local_num_crops)
        ]
        large, small = views[: crops.global_num_crops], views[crops.global_num_crops :]
        masks = [random_mask(self._transform.masked_patch_transform, generator) for _ in large]
        return (
            torch.stack(large),
            torch.stack(small),
            torch.from_numpy(np.stack(masks).reshape(len(masks), -1)),
        )

    @staticmethod
    def _view(
        image: Image.Image, crops: MultiCropConfig, number: int, generator: np.random.Generator
    ) -> Tensor:
        large = number < crops.global_num_crops
        crop = RandomResizedCropConfig(
            name="random_resized_crop",
            size=(crops.global_image_size if large else crops.local_image_size,),
            scale=crops.global_crops_scale if large else crops.local_crops_scale,
            interpolation=crops.interpolation,
        )
        return transform(image, (crop, *crops.multicrop_transform_list), generator, part=number)


def random_mask(config: MaskedPatchConfig, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Draw a mask of patches: empty, or made of random blocks (arXiv:2106.08254, algorithm 1).

    Args:
        config: probability and ratio of masked patches.
        generator: source of all random choices.

    Returns:
        The mask, bool [rows, columns], True for a masked patch.
    """
    side = config.image_size // config.patch_size
    mask = np.zeros((side, side), dtype=np.bool_)
    if generator.random() >= config.mask_probability:
        return mask
    wanted = int(side * side * generator.uniform(*config.mask_ratio_tuple))
    while (missing := wanted - int(mask.sum())) > 0:
        for _ in range(_ATTEMPTS):
            block = _random_block(side, missing, generator)
            new = int((~mask[block]).sum())
            if 0 < new <= missing:
                mask[block] = True
                break
        else:
            break  # no block fits any more
    return mask


def _random_block(side: int, most: int, generator: np.random.Generator) -> tuple[slice, slice]:
    """Return the rows and columns of a random block of about `most` patches or fewer."""
    area = generator.uniform(min(_LEAST_BLOCK, most), most)
    ratio = math.exp(generator.uniform(math.log(_LEAST_RATIO), -math.log(_LEAST_RATIO)))
    height, width = (min(side, max(1, round(math.sqrt(each)))) for each in (area * ratio, area / ratio))
    top, left = (int(generator.integers(side - size + 1)) for size in (height, width))
    return slice(top, top + height), slice(left, left + width)


def read_views(config: ViewDataConfig, *, channels: int) -> ImageViews:
    """Return the data set that a section of a params file describes.

    Args:
        config: the section.
        channels: channels that the model reads.

    Raises:
        DataError: if no image is found.
    """
    files, _ = find_classes(config.dataset.root / config.dataset.split, is_image)
    return ImageViews(files, config, channels=channels)
