"""MNIST: handwritten digits, read from the original IDX files."""

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
"""Mean and standard deviation of the pixels of the training set, scaled to [0, 1]."""

_PREFIXES = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTES = 0x08


class Digits:
    """A data set of handwritten digits.

    A batch has `inputs`, fp32 [batch, 1, 28, 28], normalized, and `labels`, int64 [batch].

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
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        indices = [draw % len(self) for draw in draws]
        pixels = torch.from_numpy(self.images[indices]).float() / 255
        return {
            "inputs": ((pixels - _MEAN) / _STD).unsqueeze(1),
            "labels": torch.from_numpy(self.labels[indices].astype(np.int64)),
        }


def read_digits(config: MNISTDataConfig) -> Digits:
    """Return the data set that a section of a params file describes.

    Raises:
        DataError: if a file is missing or damaged.
    """
    prefix = _PREFIXES[config.split]
    images_file = _find(config.data_dir, f"{prefix}*images*idx3-ubyte*")
    labels_file = _find(config.data_dir, f"{prefix}*labels*idx1-ubyte*")
    images, labels = read_idx(images_file), read_idx(labels_file)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataError(
            "expected images of shape [samples, 28, 28] and labels of shape [samples], "
            f"got {list(images.shape)} and {list(labels.shape)}",
            where=f"{images_file} and {labels_file.name}",
            remedy="copy both files again",
        )
    return Digits(images, labels)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file of bytes, compressed (.gz) or not.

    Raises:
        DataError: if it is not a complete IDX file of bytes.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path), remedy="copy it again") from error
    dimensions = content[3] if len(content) >= 4 and content[:3] == bytes((0, 0, _UNSIGNED_BYTES)) else 0
    header = 4 * (1 + dimensions)
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], dtype=">u4"))
    if not dimensions or len(shape) != dimensions or len(content) != header + math.prod(shape):
        what = "file is not an IDX file of bytes, or is incomplete"
        raise DataError(what, where=str(path), remedy="copy it again")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern)) or sorted(folder.glob(f"MNIST/raw/{pattern}"))
    if not found:
        raise DataError(
            f"no file matches {pattern}",
            where=f"data_dir: {folder}",
            remedy="set data_dir to the folder that holds MNIST's files",
        )
    return found[0]
