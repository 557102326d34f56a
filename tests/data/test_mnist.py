"""MNIST's IDX files."""

import gzip
import struct

import numpy as np
import pytest
import torch

from headwater.config.data import MNISTDataConfig
from headwater.core.errors import DataError
from headwater.data.image.mnist import read_digits, read_idx


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder, images, labels, prefix="train"):
    (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))


def config(folder, **changes):
    return MNISTDataConfig(data_processor="MNISTDataProcessor", data_dir=str(folder), batch_size=2, **changes)


def test_pixels_and_classes(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    write(tmp_path, images, np.arange(5, dtype=np.uint8))
    write(tmp_path, images[:2], np.array([7, 8], dtype=np.uint8), prefix="t10k")
    batch = read_digits(config(tmp_path)).__getitems__([4, 5 + 1])
    assert batch["labels"].tolist() == [4, 1]
    assert batch["inputs"].shape == (2, 1, 28, 28)
    pixels = torch.from_numpy(images[[4, 1]]).unsqueeze(1) / 255
    torch.testing.assert_close(batch["inputs"] * 0.3081 + 0.1307, pixels)
    assert read_digits(config(tmp_path, split="val")).__getitems__([1])["labels"].tolist() == [8]


def test_damaged_files_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no file matches train\*images"):
        read_digits(config(tmp_path))
    images = np.zeros((5, 28, 28), dtype=np.uint8)
    write(tmp_path, images, np.zeros(4, dtype=np.uint8))
    with pytest.raises(DataError, match=r"got \[5, 28, 28\] and \[4\]"):
        read_digits(config(tmp_path))
    path = tmp_path / "file"
    for content in (b"", b"abc", idx(images)[:-1], b"\0\0\x0d" + idx(images)[3:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not an IDX file"):
            read_idx(path)
    broken = tmp_path / "file.gz"
    broken.write_bytes(gzip.compress(idx(images))[:-20])
    with pytest.raises(DataError, match="cannot read"):
        read_idx(broken)
