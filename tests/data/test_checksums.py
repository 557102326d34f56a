"""Damaged HDF5 files: a sample is read as it was written, or refused."""

import random

import h5py
import numpy as np
import pytest

from headwater.core.errors import DataError
from headwater.data.checksums import MARK, sample_checksums
from headwater.data.open_files import OpenFiles
from headwater.data.reader import open_samples
from headwater.data.records import HDF5Records
from headwater.data.sample_file import make_samples, write_datasets

COUNT, LENGTH, VOCAB = 40, 96, 4096


@pytest.fixture(params=["gzip", None], ids=["gzip", "uncompressed"])
def sample_file(request, tmp_path):
    """Return a file of samples, compressed or not: other programs also write uncompressed files."""
    path = tmp_path / "data-00000.h5"
    tokens = np.random.default_rng(0).integers(0, VOCAB, (COUNT, LENGTH + 1)).astype(np.int32)
    write_datasets(path, [{"data": make_samples(tokens)}], COUNT, compression=request.param)
    return path


def read_all(folder):
    """All samples in a folder [samples, channels, length]."""
    samples = open_samples([folder], vocab_size=VOCAB, sequence_length=LENGTH)
    batch = samples.__getitems__(range(len(samples)))
    if isinstance(batch, DataError):
        raise batch
    return np.stack([values.numpy() for values in batch.values()], axis=1)


def test_flipped_bit_is_detected_or_has_no_effect(sample_file):
    good, written = sample_file.read_bytes(), read_all(sample_file.parent)
    found, generator = 0, random.Random(0)
    for _ in range(100):
        bit = generator.randrange(8 * len(good))
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        sample_file.unlink()  # HDF5 reads on in a file of the same inode that is still open
        sample_file.write_bytes(damaged)
        try:
            assert np.array_equal(read_all(sample_file.parent), written), f"bit {bit}"
        except DataError:
            found += 1
    assert found > 50


def test_error_names_the_damaged_sample(sample_file):
    with h5py.File(sample_file, "r+") as file:
        file["data"][7, 0, 3] ^= 1
    with pytest.raises(DataError, match="sample is damaged") as raised:
        read_all(sample_file.parent)
    assert raised.value.where == f"{sample_file}, sample 7"


def swap(file):
    file["data"][2], file["data"][3] = file["data"][3], file["data"][2]


def forget(file):
    for name in list(file["data"].attrs):
        del file["data"].attrs[name]


def shorten(file):
    data, attributes = file["data"][:-1], dict(file["data"].attrs)
    del file["data"]
    file["data"] = data
    file["data"].attrs.update(attributes)


def unmark(file):
    del file.attrs[MARK]
    file["data"][0] = 0


@pytest.mark.parametrize("damage", [swap, forget, shorten, unmark])
def test_moved_or_changed_samples_are_detected(sample_file, damage):
    with h5py.File(sample_file, "r+") as file:
        damage(file)
    with pytest.raises(DataError):
        read_all(sample_file.parent)


def test_files_without_checksums_are_read(sample_file):
    written = read_all(sample_file.parent)
    with h5py.File(sample_file, "r+") as file:
        del file.attrs[MARK]
        for samples in file.values():
            for name in [name for name in samples.attrs if name.startswith("checksums_")]:
                del samples.attrs[name]
    assert np.array_equal(read_all(sample_file.parent), written)


def test_fields_and_texts_have_checksums(tmp_path):
    path = tmp_path / "fields.h5"
    fields = {
        "label": np.arange(6, dtype=np.int32),
        "pixels": np.arange(6 * 3, dtype=np.uint8).reshape(6, 3),
        "img_path": np.array(["a.png", "ä.png", "", "b", "c", "d"], dtype=object),
    }
    write_datasets(path, [fields], 6, dtype=None)
    for name, values in fields.items():
        records = HDF5Records(path, OpenFiles())
        assert records.names == fields.keys()
        read = [records.read(index, name) for index in range(6)]
        read = [value.decode() if isinstance(value, bytes) else value for value in read]
        assert np.array_equal(np.array(read, dtype=values.dtype), values)
        del records  # the reader keeps the file open
        with h5py.File(path, "r+") as file:
            file[name][4] = file[name][5]
        with pytest.raises(DataError, match=f"sample is damaged: its values in '{name}'"):
            HDF5Records(path, OpenFiles()).read(4, name)


def test_two_flips_do_not_cancel_out():
    values = np.random.default_rng(1).integers(0, 2**32, (1, 64), dtype=np.uint32)
    good = sample_checksums("data", [0], values)
    for bit in range(32):
        for first, second in ((0, 1), (1, 3), (0, 2), (5, 63)):
            damaged = values.copy()
            damaged[0, [first, second]] ^= np.uint32(1 << bit)
            assert sample_checksums("data", [0], damaged) != good, (bit, first, second)


def test_a_file_of_many_samples(tmp_path):
    values = np.arange(9000, dtype=np.int32)
    write_datasets(tmp_path / "many.h5", [{"label": values}], 9000)
    records = HDF5Records(tmp_path / "many.h5", OpenFiles())
    assert [records.read(index, "label") for index in (0, 4095, 4096, 8999)] == [0, 4095, 4096, 8999]
