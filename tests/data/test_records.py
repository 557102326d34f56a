"""Samples of named fields in HDF5 and CSV files."""

import csv
import pickle

import h5py
import numpy as np
import pytest
import torch

from headwater.core.errors import DataError
from headwater.data.open_files import OpenFiles
from headwater.data.records import CSVRecords, FieldSpec, HDF5Records, open_records
from headwater.data.sample_file import open_sample_file
from read_only import another_user

FIELDS = [
    FieldSpec("input_ids", ("input_ids",), (5,), fill=9, below=100),
    FieldSpec("mask", ("attention_mask", "input_mask"), (5,)),
    FieldSpec("label", ("label", "labels")),
    FieldSpec("segments", ("segment_ids",), (5,), default=3),
]
ROWS = [([1, 2, 3], [1, 1, 1], 0), ([4, 5, 6, 7, 8, 10, 11], [1] * 7, 2), ([12], [1], 1)]


def write_csv(path, rows=ROWS, names=("input_ids", "input_mask", "label")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)


def write_hdf5(path, rows=ROWS):
    with h5py.File(path, "w") as file:
        width = max(len(ids) for ids, _, _ in rows)
        for name, column in (("input_ids", 0), ("attention_mask", 1)):
            file[name] = np.array([row[column] + [0] * (width - len(row[column])) for row in rows])
        file["labels"] = np.array([[row[2]] for row in rows])


def test_csv_fields_are_cut_and_padded(tmp_path):
    write_csv(tmp_path / "a.csv")
    write_csv(tmp_path / "b.csv", ROWS[:1])
    records = open_records(tmp_path, FIELDS, 5)
    assert len(records) == 4
    batch = records.__getitems__([1, 3, 4 + 2])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8], [1, 2, 3, 9, 9], [12, 9, 9, 9, 9]]
    assert batch["mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert batch["label"].tolist() == [2, 0, 1]
    assert torch.equal(batch["segments"], torch.full((3, 5), 3))
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_hdf5_and_csv_read_the_same(tmp_path):
    for kind, write in (("csv", write_csv), ("h5", write_hdf5)):
        (tmp_path / kind).mkdir()
        write(tmp_path / kind / f"samples.{kind}")
    fields = [FieldSpec("input_ids", ("input_ids",), (3,)), *FIELDS[2:]]
    from_csv, from_hdf5 = (
        open_records(tmp_path / kind, fields, 3).__getitems__([0, 1, 2]) for kind in ("csv", "h5")
    )
    assert all(torch.equal(from_csv[name], from_hdf5[name]) for name in from_csv)


def test_open_hdf5_file_can_be_pickled(tmp_path):
    write_hdf5(tmp_path / "a.h5")
    records = HDF5Records(tmp_path / "a.h5", OpenFiles())
    assert records.read(0, "labels").tolist() == [0]
    assert pickle.loads(pickle.dumps(records)).read(1, "labels").tolist() == [2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([([1], [1], 0), ([1], [1])], r"expected 3 columns as in the header, got 2(.|\n)*a.csv, line 3"),
        (
            [([1], [1], 0), ("x y", [1], 0)],
            r"expected a number or a list in column input_ids, got 'x y'(.|\n)*line 3",
        ),
        (
            [([1], [1], 0), ([[1]], [1], 0)],
            r"expected a field with 1 dimensions, got 2(.|\n)*sample 1, input_ids",
        ),
        ([([1], [1], 0), ([100], [1], 0)], r"expected values below 100, got 100(.|\n)*sample 1"),
        ([([1], [1], 0), (["a"], [1], 0)], r"cannot be read(.|\n)*sample 1"),
        ([([1], [1], 0), ([1], [1], [])], r"cannot be read(.|\n)*sample 1"),
    ],
)
def test_error_names_the_damaged_line(tmp_path, rows, message):
    write_csv(tmp_path / "a.csv", rows)
    error = open_records(tmp_path, FIELDS, 5).__getitems__([0, 1])
    with pytest.raises(DataError, match=message):
        raise error


def test_a_line_that_python_cannot_read_is_named(tmp_path):
    write_csv(tmp_path / "a.csv", [([1], [1], 0), ([1] * 1000, [1], 0)])
    records = open_records(tmp_path, FIELDS, 5)
    before = csv.field_size_limit(1000)  # the reader of raw records raises it in the whole process
    try:
        error = records.__getitems__([0, 1])
    finally:
        csv.field_size_limit(before)
    assert isinstance(error, DataError)
    assert "the line cannot be read: field larger" in error.what
    assert error.where.endswith("a.csv, line 3")


def test_errors_name_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        open_records(tmp_path / "none", FIELDS, 5)
    with pytest.raises(DataError, match=r"holds no \.h5"):
        open_records(tmp_path, FIELDS, 5)
    write_csv(tmp_path / "a.csv", [], names=("input_ids", "input_mask", "label"))
    with pytest.raises(DataError, match="no samples"):
        open_records(tmp_path, FIELDS, 5)
    write_csv(tmp_path / "a.csv", ROWS, names=("input_ids", "other", "label"))
    with pytest.raises(DataError, match=r"no field attention_mask; its fields: input_ids, label, other"):
        open_records(tmp_path, FIELDS, 5)
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        CSVRecords(tmp_path / "a.csv")
    (tmp_path / "a.csv").unlink()
    (tmp_path / "b.h5").write_bytes(b"no HDF5")
    with pytest.raises(DataError, match="cannot be opened"):
        open_records(tmp_path, FIELDS, 5)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["a"], file["b"] = np.zeros(3), np.zeros(4)
    with pytest.raises(DataError, match="datasets of the same length"):
        open_records(tmp_path, FIELDS, 5)


def test_answers_and_classes_are_read_from_csv(tmp_path):
    from headwater.data.text.fields import answer_fields, class_fields

    names = ("input_ids", "input_mask", "segment_ids", "start_position", "end_position")
    write_csv(tmp_path / "a.csv", [([1, 2, 3], [1, 1, 1], [0, 1, 1], 1, 2)], names)
    batch = open_records(tmp_path, answer_fields(4, vocab_size=9, segments=2), 4).__getitems__([0])
    assert {name: batch[name].tolist() for name in batch} == {
        "input_ids": [[1, 2, 3, 0]],
        "attention_mask": [[1, 1, 1, 0]],
        "token_type_ids": [[0, 1, 1, 0]],
        "start_positions": [1],
        "end_positions": [2],
    }
    labelled = tmp_path / "labelled"
    labelled.mkdir()
    write_csv(labelled / "a.csv", [([1, 2], [1, 1], 1)], ("input_ids", "attention_mask", "labels"))
    batch = open_records(labelled, class_fields(3, vocab_size=9, pad=7, segments=0), 3).__getitems__([0])
    assert batch["input_ids"].tolist() == [[1, 2, 7]]
    assert batch["labels"].tolist() == [1]


def test_a_csv_file_may_begin_with_a_byte_order_mark(tmp_path):
    write_csv(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    assert open_records(tmp_path, FIELDS, 5).sample(2)["input_ids"].tolist() == [12, 9, 9, 9, 9]


def test_a_line_that_is_not_utf_8_is_refused(tmp_path):
    write_csv(tmp_path / "a.csv", ROWS, ("input_ids", "input_mask", "label"))
    with (tmp_path / "a.csv").open("ab") as file:
        file.write(b'"[1]","[1]",\xff\r\n')
    records = open_records(tmp_path, FIELDS, 5)
    assert records.sample(2)["label"] == 1
    with pytest.raises(DataError, match=r"cannot be read: 'utf-8' codec(.|\n)*a.csv, line 5"):
        records.sample(3)


@pytest.mark.parametrize("value", [1.5, 2**70])
def test_a_number_that_is_not_an_integer_of_64_bits_is_refused(tmp_path, value):
    write_csv(tmp_path / "a.csv", [([1, 2.0], [1, 1], 0), ([1, value], [1, 1], 0)])
    records = open_records(tmp_path, FIELDS, 5)
    assert records.sample(0)["input_ids"].tolist() == [1, 2, 9, 9, 9]
    with pytest.raises(DataError, match="the field cannot be read"):
        records.sample(1)


@pytest.mark.parametrize("open_file", [lambda path: HDF5Records(path, OpenFiles()), open_sample_file])
def test_a_file_that_the_user_may_not_read_needs_no_new_preparation(protected, open_file):
    path = protected.parent / "data.h5"
    path.touch(mode=0)
    with another_user(), pytest.raises(DataError, match="cannot be opened: Permission denied") as caught:
        open_file(path)
    assert caught.value.remedy == "give this user the right to read the file and the folders on the way to it"
