"""The HDF5 files of texts with images: their layout, written and checked here alone.

A file has the datasets

- `data`, int32 [samples, channels, sequence_length], at least the first four of `CHANNELS`;
- `img_path`, text [samples, images] (or [samples], one image each): where an image is below the folder of
  images, or `NO_IMAGE`;
- `img_data_loc`, int32 [samples, images, features]: the places in the sequence that the features of an image
  take, beyond its end where there is no image. Without it all samples have one image at one place.

It is the layout of the public Cerebras Model Zoo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.records import HDF5Records

CHANNELS = ("input_ids", "attention_mask", "labels", "key_padding_mask", "token_modality_idx")
"""Tokens; 1 where the label counts; the token after each; 1 where a token is padding; 1 where an image is."""

NO_IMAGE = "None"
_NEEDED = 4
_BLOCK = 64
"""Samples that are written at once."""

Numbers = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ImageText:
    """A sample as it is stored.

    Attributes:
        data: [channels, sequence_length].
        paths: of each image, `None` where there is none.
        places: [images, features]; `None` where the file does not say it.
    """

    data: Numbers
    paths: tuple[str | None, ...]
    places: Numbers | None


class ImageTextFile:
    """A file that was checked.

    Args:
        path: where it is.

    Raises:
        DataError: if it has another layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = HDF5Records(path)
        for name in ("data", "img_path"):
            if name not in self._records.names:
                raise _misshapen(path, f"the dataset {name} is missing")
        with h5py.File(path, "r") as file:
            shapes = {name: file[name].shape for name in self._records.names}
        self.has_places = "img_data_loc" in shapes
        if len(shapes["data"]) != 3 or shapes["data"][1] < _NEEDED:
            raise _misshapen(path, f"data has the shape {list(shapes['data'])}")
        if self.has_places and len(shapes["img_data_loc"]) != 3:
            raise _misshapen(path, f"img_data_loc has the shape {list(shapes['img_data_loc'])}")
        self.sequence_length = int(shapes["data"][2])
        self.num_images = int(shapes["img_path"][1]) if len(shapes["img_path"]) > 1 else 1
        self.num_features = int(shapes["img_data_loc"][2]) if self.has_places else None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> ImageText:
        """A sample.

        Raises:
            DataError: if it cannot be read.
        """
        names = ("data", "img_path", *(["img_data_loc"] if self.has_places else []))
        try:
            data, paths, *places = (self._records.read(index, name) for name in names)
        except OSError as error:
            raise DataError(
                f"the sample cannot be read: {error}", where=f"{self.path}, sample {index}", remedy=_REMEDY
            ) from error
        names = tuple(_text(path) for path in np.atleast_1d(np.asarray(paths, dtype=object)))
        known = tuple(None if name in ("", NO_IMAGE) else name for name in names)
        return ImageText(np.asarray(data, dtype=np.int32), known, places[0] if places else None)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", errors="surrogateescape") if isinstance(value, bytes) else str(value)


class ImageTextWriter:
    """Writes samples one after the other.

    Args:
        file: opened for writing.
        sequence_length: tokens of a sample.
        num_images: images of a sample.
        num_features: places that an image takes.
    """

    def __init__(self, file: h5py.File, sequence_length: int, num_images: int, num_features: int) -> None:
        shapes: dict[str, tuple[tuple[int, ...], object]] = {
            "data": ((len(CHANNELS), sequence_length), "i4"),
            "img_path": ((num_images,), h5py.string_dtype()),
            "img_data_loc": ((num_images, num_features), "i4"),
        }
        self._data = {
            name: file.create_dataset(
                name, (0, *shape), maxshape=(None, *shape), dtype=dtype, chunks=(1, *shape),
                compression="gzip", compression_opts=1,
            )
            for name, (shape, dtype) in shapes.items()
        }  # fmt: skip
        self._held: list[ImageText] = []

    def add(self, sample: ImageText) -> None:
        """Write a sample with all channels and the places of its images."""
        self._held.append(sample)
        if len(self._held) == _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        columns: dict[str, Sequence[object]] = {
            "data": [sample.data for sample in self._held],
            "img_path": [[path or NO_IMAGE for path in sample.paths] for sample in self._held],
            "img_data_loc": [sample.places for sample in self._held],
        }
        for name, column in columns.items():
            dataset = self._data[name]
            start = len(dataset)
            dataset.resize(start + len(column), axis=0)
            dataset[start:] = np.stack([np.asarray(value, dtype=dataset.dtype) for value in column])
        self._held = []


@contextmanager
def written_file(
    path: Path, *, sequence_length: int, num_images: int, num_features: int
) -> Iterator[ImageTextWriter]:
    """A file to write, which appears when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with h5py.File(partial, "w") as file:
            writer = ImageTextWriter(file, sequence_length, num_images, num_features)
            yield writer
            writer.flush()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _misshapen(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), remedy=_REMEDY)


_REMEDY = (
    f"prepare the data again: data [samples, {_NEEDED} or more, sequence_length], "
    "img_path [samples, images], img_data_loc [samples, images, features]"
)
