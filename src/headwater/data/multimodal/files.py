"""HDF5 files of texts with images: the only place that checks their layout.

A file has the datasets

- `data`, int32 [samples, channels, sequence_length], with at least the first four channels of
  `headwater.data.multimodal.layout.CHANNELS`;
- `img_path`, text [samples, images], or [samples] with one image per sample: path of an image relative to the
  folder of images, or `NO_IMAGE`;
- `img_data_loc`, int32 [samples, images, features]: positions of the features of an image in the sequence.
  They are `sequence_length` or more if the sample lacks the image. Without this dataset every sample has one
  image, always at the same position.

This is the layout of the public Cerebras Model Zoo.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.multimodal.layout import NO_IMAGE
from headwater.data.open_files import OpenFiles
from headwater.data.records import HDF5Records

_NEEDED = 4

Numbers = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ImageText:
    """A sample of text and images as read from a sample file.

    Attributes:
        data: tokens, masks and labels, [channels, sequence_length].
        paths: path of each image; `None` if the sample lacks it.
        places: positions of the features, [images, features]; `None` if the file does not have them.
    """

    data: Numbers
    paths: tuple[str | None, ...]
    places: Numbers | None


class ImageTextFile:
    """A file of texts with images, whose layout is checked when it is opened.

    Args:
        path: path of the file.
        open_files: cache that opens the file when it is read; shared by the files of a data set.

    Raises:
        DataError: if the file cannot be read or has another layout.
    """

    def __init__(self, path: Path, open_files: OpenFiles) -> None:
        self.path = path
        self._records = HDF5Records(path, open_files)
        for name in ("data", "img_path"):
            if name not in self._records.names:
                raise _misshapen(path, f"the file lacks the dataset {name}")
        with h5py.File(path, "r") as file:
            shapes = {name: file[name].shape for name in self._records.names}
        self.has_places = "img_data_loc" in shapes
        if len(shapes["data"]) != 3 or shapes["data"][1] < _NEEDED:
            what = f"expected data of shape [samples, {_NEEDED} or more, sequence_length]"
            raise _misshapen(path, f"{what}, got {list(shapes['data'])}")
        if self.has_places and len(shapes["img_data_loc"]) != 3:
            what = "expected img_data_loc of shape [samples, images, features]"
            raise _misshapen(path, f"{what}, got {list(shapes['img_data_loc'])}")
        self.sequence_length = int(shapes["data"][2])
        self.num_images = int(shapes["img_path"][1]) if len(shapes["img_path"]) > 1 else 1
        self.num_features = int(shapes["img_data_loc"][2]) if self.has_places else None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> ImageText:
        """Return a sample.

        Raises:
            DataError: if it cannot be read, or does not match its checksum.
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


def _misshapen(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), remedy=_REMEDY)


_REMEDY = (
    f"prepare the data again: data [samples, {_NEEDED} or more, sequence_length], "
    "img_path [samples, images], img_data_loc [samples, images, features]"
)
