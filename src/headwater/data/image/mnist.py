"""MNIST's files of images and classes."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headwater.config.data import MNISTDataConfig
from headwater.core.errors import DataError
from headwater.data.loader import Batch

_MEAN, _STD = 0.1307, 0.3081
"""Of the pixels of the training set, between 0 and 1."""

_PREFIXES = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTES = 0x08


class Digits:
    """Handwritten digits: a batch is `inputs` [batch, 1, 28, 28], normalized, and `labels` [batch].

    Args:
        images: uint8 [samples, 28, 28].
        labels: uint8 [samples].
    """

    sequence_length = None

    def __init__(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """The batch of these samples; see `headwater.data.source.Samples`."""
        indices = [draw % len(self) for draw in draws]
        pixels = torch.from_numpy(self.images[indices]).float() / 255
        return {
            "inputs": ((pixels - _MEAN) / _STD).unsqueeze(1),
            "labels": torch.from_numpy(self.labels[indices].astype(np.int64)),
        }


def read_digits(config: MNISTDataConfig) -> Digits:
    """The samples that a section of a params file names.

    Raises:
        DataError: if a file is missing or damaged.
    """
    prefix = _PREFIXES[config.split]
    images_file = _find(config.data_dir, f"{prefix}*images*idx3-ubyte*")
    labels_file = _find(config.data_dir, f"{prefix}*labels*idx1-ubyte*")
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataError(
            f"images have shape {list(images.shape)} and classes {list(labels.shape)}",
            where=f"{images_file} and {labels_file.name}",
            remedy="copy both files again",
        )
    return Digits(images, labels)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of bytes, compressed or not.

    Raises:
        DataError: if it is none.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path), remedy="copy it again") from error
    dimensions = content[3] if len(content) >= 4 and content[:3] == bytes((0, 0, _UNSIGNED_BYTES)) else 0
    header = 4 * (1 + dimensions)
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], dtype=">u4"))
    if not dimensions or len(shape) != dimensions or len(content) != header + math.prod(shape):
        raise DataError("the file is no whole IDX file of bytes", where=str(path), remedy="copy it again")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern)) or sorted(folder.glob(f"MNIST/raw/{pattern}"))
    if not found:
        raise DataError(
            f"there is no file {pattern}",
            where=f"data_dir: {folder}",
            remedy="name the folder that holds MNIST's files",
        )
    return found[0]
