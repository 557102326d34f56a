"""Packing: which examples each sample holds, and how samples are split between training and validation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

from headwater.core.errors import DataError
from headwater.data.packing import arrange, numbered_tasks, pack, split_samples
from headwater.data.split_files import SplitFiles
from headwater.data.staging import complete_file

CAPACITY = 10


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40))
def test_packed_samples_hold_every_example_once_and_never_overflow(sizes):
    numbers, ends = pack(np.array(sizes), CAPACITY)
    assert sorted(numbers.tolist()) == list(range(len(sizes)))
    groups = np.split(numbers, ends[:-1])
    used = [sum(sizes[number] for number in group) for group in groups]
    assert max(used) <= CAPACITY
    assert len(groups) == 1 or min(map(sum, itertools.pairwise(used))) > CAPACITY // 2


@given(st.lists(st.integers(2, CAPACITY + 1), min_size=1, max_size=40))
def test_padding_is_what_the_texts_leave_free(tokens):
    lengths = np.array([[count, count] for count in tokens])
    labels = sum(tokens) - len(tokens)
    places, padding = arrange(lengths, CAPACITY, "single")
    assert (len(places), padding) == (len(tokens), len(tokens) * CAPACITY - labels)
    places, padding = arrange(lengths, CAPACITY, "apart")
    assert padding == len(places) * CAPACITY - labels
    places, padding = arrange(lengths, CAPACITY, "joined")
    # Between two texts of a joined sample, the last token of the first has a label: the start of the second.
    assert padding == len(places) * CAPACITY - (labels + len(tokens) - len(places))
    assert arrange(lengths, CAPACITY, None)[1] == 0


def test_places_point_at_the_rows_of_each_example():
    lengths = np.array([[3, 3], [2, 2], [4, 4]])
    places, _ = arrange(lengths, 8, None)
    assert places.starts.tolist() == [0, 6, 10]
    chosen = places.take(np.array([2, 0]))
    assert (chosen.starts.tolist(), chosen.numbers.tolist()) == ([10, 0], [2, 0])


def test_tasks_have_about_the_same_size(monkeypatch):
    monkeypatch.setattr("headwater.data.packing._TASK_CHARS", 5)
    assert list(numbered_tasks(["abc", "de", "f", "ghijkl", "m"], len)) == [
        (0, ["abc", "de"]),
        (1, ["f", "ghijkl"]),
        (2, ["m"]),
    ]


def test_every_sample_is_in_one_split():
    splits = split_samples(20, 0.1, seed=3)
    assert [len(splits[name]) for name in ("train", "val")] == [18, 2]
    assert sorted(np.concatenate(list(splits.values())).tolist()) == list(range(20))
    assert [len(each) for each in split_samples(20, 0.001, seed=3).values()] == [19, 1]
    with pytest.raises(DataError, match="it makes 1 sample, too few"):
        split_samples(1, 0.5, seed=0)


def write_numbers(task):
    path, numbers = task
    path.write_text(" ".join(map(str, numbers)))
    return len(numbers)


def test_complete_files_are_kept(tmp_path):
    files = SplitFiles(tmp_path, samples_per_file=2, num_workers=1, bar=Progress(disable=True))
    (tmp_path / "train").mkdir()
    (tmp_path / "train/data-00000.txt").write_text("kept")
    splits = {"train": np.array([4, 2, 0]), "val": np.array([1])}
    assert files.write(splits, lambda samples: samples.tolist(), write_numbers, ".txt") == {
        "train": 3,
        "val": 1,
    }
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.txt")}
    assert found == {"train/data-00000.txt": "kept", "train/data-00001.txt": "0", "val/data-00000.txt": "1"}


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(ValueError, match="stop"), complete_file(path) as partial:
        partial.write_text("half")
        raise ValueError("stop")
    assert not path.exists()
    with complete_file(path) as partial:
        partial.write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
