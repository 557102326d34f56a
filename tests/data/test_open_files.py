"""Data sets of many HDF5 files keep only some of them open."""

import pickle

import h5py
import numpy as np

from headwater.data.open_files import MAX_OPEN_FILES, OpenFiles
from headwater.data.records import FieldSpec, open_records


def num_open() -> int:
    return h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)


def test_only_the_last_files_stay_open(tmp_path):
    before, count = num_open(), MAX_OPEN_FILES + 5
    for number in range(count):
        with h5py.File(tmp_path / f"{number:02}.h5", "w") as file:
            file["label"] = np.array([number])
    records = open_records(tmp_path, [FieldSpec("label", ("label",))], 1)
    for draws in (range(count), reversed(range(count))):
        for draw in draws:
            assert records.__getitems__([draw])["label"].tolist() == [draw]
    assert num_open() - before == MAX_OPEN_FILES
    copy = pickle.loads(pickle.dumps(records))
    assert num_open() - before == MAX_OPEN_FILES, "a copy opens its files itself"
    assert copy.__getitems__([3])["label"].tolist() == [3]
    assert copy.files[0]._open_files is copy.files[1]._open_files


def test_a_file_is_opened_once(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["label"] = np.array([7])
    opened = OpenFiles()
    assert opened[tmp_path / "a.h5"] is opened[tmp_path / "a.h5"]
