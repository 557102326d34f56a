"""Texts with images as batches."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.config.data import ImageTextDataConfig
from headwater.config.models import LlavaConfig, MultimodalSection
from headwater.core.errors import ConfigError, DataError
from headwater.core.seeding import derive_seed
from headwater.data.image.files import mode_of, read_image
from headwater.data.image.transforms import transform
from headwater.data.loader import Batch
from headwater.data.multimodal.files import ImageText, ImageTextFile
from headwater.data.records import record_files

Places = npt.NDArray[np.int64]


class ImageTexts:
    """Texts with images.

    A batch is `input_ids`, `attention_mask` and `labels` [batch, seq], `images` [batch, images, channels, h,
    w] and `image_places` [batch, images, features]. Where a sample has fewer images, the places are beyond
    its end.

    Args:
        files: the texts, all of one length.
        config: where the images are, and what is done to them.
        model: the model that reads them.

    Raises:
        ConfigError: if the model takes images of another size.
        DataError: if the files do not fit the model or each other.
    """

    def __init__(
        self, files: Sequence[ImageTextFile], config: ImageTextDataConfig, model: MultimodalSection
    ) -> None:
        self.files, self.sequence_length = files, files[0].sequence_length
        self._config, self._shape, self._features = config, model.image_shape, model.num_features
        self._mode, self._vocab_size = mode_of(model.image_shape[0]), model.text_model.vocab_size
        self._num_images = max(file.num_images for file in files)
        self._start = model.image_start_idx if isinstance(model, LlavaConfig) else None
        self._ends = list(itertools.accumulate(map(len, files)))
        if config.image_data_size is not None and config.image_data_size != self._shape:
            raise ConfigError(
                f"image_data_size is {list(config.image_data_size)}, the model takes {list(self._shape)}",
                where="image_data_size",
                remedy="leave it out, and transform the images to the model's size",
            )
        if not config.img_data_dir.is_dir():
            raise DataError(
                "img_data_dir is not a folder",
                where=f"img_data_dir: {config.img_data_dir}",
                remedy="name the folder below which the images are",
            )
        for file in files:
            self._check(file, model)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """The batch of these samples; see `headwater.data.source.Samples`."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _sample(self, draw: int) -> dict[str, Tensor]:
        index = draw % len(self)
        number = bisect.bisect_right(self._ends, index)
        file = self.files[number]
        place = index - (self._ends[number] - len(file))
        stored = file[place]
        largest = int(stored.data[0].max(initial=0))
        if largest >= self._vocab_size:
            raise DataError(
                f"the token {largest} is not below the model's vocab_size, {self._vocab_size}",
                where=f"{file.path}, sample {place}",
                remedy=f"raise it to {largest + 1} or more, or name data that were made for this model",
            )
        # Padding in the middle, where an image could have been, goes to the end, where nothing sees it.
        order = np.argsort(stored.data[3] != 0, kind="stable")
        tokens, mask, labels = (torch.from_numpy(row[order].astype(np.int64)) for row in stored.data[:3])
        images = [self._image(draw, number, path) for number, path in enumerate(stored.paths)]
        images += [torch.zeros(self._shape)] * (self._num_images - len(images))
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": labels,
            "images": torch.stack(images),
            "image_places": torch.from_numpy(self._places(stored, order)),
        }

    def _places(self, stored: ImageText, order: npt.NDArray[np.int64]) -> Places:
        """Where the features are, [images, features], in the new order of the tokens."""
        nowhere = self.sequence_length
        new_place = np.full(nowhere + 1, nowhere, dtype=np.int64)
        new_place[order] = np.arange(nowhere)
        places = np.full((self._num_images, self._features), nowhere, dtype=np.int64)
        for number, path in enumerate(stored.paths):
            if path is None:
                continue
            if stored.places is not None:
                places[number] = stored.places[number]
            elif self._start is not None:
                places[number] = self._start + np.arange(self._features)
        return new_place[np.clip(places, 0, nowhere)]

    def _image(self, draw: int, number: int, path: str | None) -> Tensor:
        """An image [channels, h, w] after the transforms; black where there is none."""
        if path is None:
            return torch.zeros(self._shape)
        seed = derive_seed(self._config.shuffle_seed or 0, "image", draw, number)
        file = self._config.img_data_dir / path
        generator = np.random.Generator(np.random.Philox(key=seed))
        image = transform(read_image(file, self._mode), self._config.transforms, generator)
        if tuple(image.shape) != self._shape:
            raise DataError(
                f"after the transforms the image is of {list(image.shape)}, "
                f"and the model takes {list(self._shape)}",
                where=str(file),
                remedy="resize and crop it in the transforms",
            )
        return image

    def _check(self, file: ImageTextFile, model: MultimodalSection) -> None:
        positions, where = model.text_model.max_position_embeddings, str(file.path)
        if file.sequence_length != self.sequence_length or file.sequence_length > positions:
            raise DataError(
                f"samples have {file.sequence_length} tokens, those of {self.files[0].path.name} have "
                f"{self.sequence_length}, and the model has {positions} positions",
                where=where,
                remedy="prepare the data with one length that the model has",
            )
        if file.num_features not in (None, self._features):
            raise DataError(
                f"an image takes {file.num_features} places, and the model gives it {self._features}",
                where=where,
                remedy=f"prepare the data with {self._features} features an image",
            )
        if file.has_places:
            return
        if self._start is None or file.num_images > 1:
            raise DataError(
                "the file does not say where the images are: img_data_loc is missing",
                where=where,
                remedy="prepare the data again, or train a model that has one image at one place (llava)",
            )
        if self._start + self._features > file.sequence_length:
            raise DataError(
                f"an image at {self._start} of {self._features} features does not fit into "
                f"{file.sequence_length} tokens",
                where=where,
                remedy="prepare the data with longer samples, or change image_start_idx",
            )


def read_image_texts(config: ImageTextDataConfig, model: MultimodalSection) -> ImageTexts:
    """The samples that a section of a params file names.

    Raises:
        ConfigError: if the model takes images of another size.
        DataError: if there are none, or they do not fit the model.
    """
    files = [
        ImageTextFile(path)
        for folder in config.data_dir
        for path in record_files(Path(folder), (".h5", ".hdf5"))
    ]
    return ImageTexts(files, config, model)
