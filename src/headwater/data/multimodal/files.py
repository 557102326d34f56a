"""The HDF5 files of texts with images: their layout, checked here alone.

A file has the datasets

- `data`, int32 [samples, channels, sequence_length], at least the first four of
  `headwater.data.multimodal.layout.CHANNELS`;
- `img_path`, text [samples, images] (or [samples], one image each): where an image is below the folder of
  images, or `NO_IMAGE`;
- `img_data_loc`, int32 [samples, images, features]: the places in the sequence that the features of an image
  take, beyond its end where there is no image. Without it all samples have one image at one place.

It is the layout of the public Cerebras Model Zoo.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.multimodal.layout import NO_IMAGE
from headwater.data.records import HDF5Records

_NEEDED = 4

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


def _misshapen(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), remedy=_REMEDY)


_REMEDY = (
    f"prepare the data again: data [samples, {_NEEDED} or more, sequence_length], "
    "img_path [samples, images], img_data_loc [samples, images, features]"
)
