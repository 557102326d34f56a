"""Data set of texts with images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.config.data import ImageTextDataConfig
from headwater.config.models.multimodal import LlavaConfig, MultimodalSection
from headwater.core.errors import ConfigError, DataError
from headwater.data.file_index import FileIndex
from headwater.data.image.files import mode_of, read_image
from headwater.data.image.transforms import transform
from headwater.data.loader import Batch
from headwater.data.multimodal.files import ImageText, ImageTextFile
from headwater.data.open_files import OpenFiles
from headwater.data.order import random_generator
from headwater.data.records import record_files

Places = npt.NDArray[np.int64]


class ImageTexts:
    """A data set of texts with images.

    A batch has `input_ids`, `attention_mask` and `labels`, int64 [batch, seq]; `images`, fp32
    [batch, images, channels, h, w]; and `image_places`, int64 [batch, images, features], the positions of the
    features in the text. If a sample has fewer images, the positions of the missing ones are `seq`.

    Args:
        files: files of samples, all with the same length.
        config: section of the params file: folder and transforms of the images.
        model: section of the model that reads the samples.

    Raises:
        ConfigError: if `image_data_size` is not the image size of the model.
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
        self._index = FileIndex(map(len, files))
        if config.image_data_size is not None and config.image_data_size != self._shape:
            raise ConfigError(
                f"image_data_size is {list(config.image_data_size)}, but the model reads {list(self._shape)}",
                where="image_data_size",
                remedy="remove image_data_size, and transform the images to the model's size",
            )
        if not config.img_data_dir.is_dir():
            raise DataError(
                "img_data_dir is not a folder",
                where=f"img_data_dir: {config.img_data_dir}",
                remedy="set it to the root folder of the images",
            )
        for file in files:
            self._check(file, model)

    def __len__(self) -> int:
        return len(self._index)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _sample(self, draw: int) -> dict[str, Tensor]:
        number, place = self._index.find(draw % len(self))
        file = self.files[number]
        stored = file[place]
        largest = int(stored.data[0].max(initial=0))
        if largest >= self._vocab_size:
            raise DataError(
                f"expected token ids below the model's vocab_size={self._vocab_size}, got {largest}",
                where=f"{file.path}, sample {place}",
                remedy=f"set vocab_size to {largest + 1} or more, or use data that were made for this model",
            )
        # Padding may be in the middle, at the place of a missing image. It is moved to the end, because no
        # token attends to it there.
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
        """Return the positions of image features, [images, features], after the tokens are put in `order`."""
        nowhere = self.sequence_length
        # There is one entry more than positions. It is for a missing image, which stays beyond the end.
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
        """Return a transformed image [channels, h, w]; zeros if the sample lacks the image."""
        if path is None:
            return torch.zeros(self._shape)
        file = self._config.img_data_dir / path
        generator = random_generator(self._config.shuffle_seed or 0, "image", draw, number)
        image = transform(read_image(file, self._mode), self._config.transforms, generator)
        if tuple(image.shape) != self._shape:
            raise DataError(
                f"expected an image of shape {list(self._shape)} after the transforms, "
                f"got {list(image.shape)}",
                where=str(file),
                remedy="add a resize or crop to the transforms",
            )
        return image

    def _check(self, file: ImageTextFile, model: MultimodalSection) -> None:
        positions, where = model.text_model.max_position_embeddings, str(file.path)
        if file.sequence_length != self.sequence_length or file.sequence_length > positions:
            raise DataError(
                f"samples have {file.sequence_length} tokens; those of {self.files[0].path.name} have "
                f"{self.sequence_length}, and the model reads at most {positions}",
                where=where,
                remedy=f"prepare all data with the same length, at most {positions}",
            )
        if file.num_features not in (None, self._features):
            raise DataError(
                f"an image takes {file.num_features} positions in the data, {self._features} in the model",
                where=where,
                remedy=f"prepare the data with --num_features {self._features}",
            )
        if file.has_places:
            return
        if self._start is None or file.num_images > 1:
            raise DataError(
                "the file lacks img_data_loc, the positions of the images",
                where=where,
                remedy="prepare the data again, or train a model with one image at a fixed position (llava)",
            )
        if self._start + self._features > file.sequence_length:
            raise DataError(
                f"an image of {self._features} features at position {self._start} does not fit into "
                f"{file.sequence_length} tokens",
                where=where,
                remedy="prepare the data with longer samples, or decrease image_start_idx",
            )


def read_image_texts(config: ImageTextDataConfig, model: MultimodalSection) -> ImageTexts:
    """Return the data set that a section of a params file describes.

    Raises:
        ConfigError: if `image_data_size` is not the image size of the model.
        DataError: if the data are empty, or do not fit the model.
    """
    open_files = OpenFiles()
    files = [
        ImageTextFile(path, open_files)
        for folder in config.data_dir
        for path in record_files(Path(folder), (".h5", ".hdf5"))
    ]
    return ImageTexts(files, config, model)
