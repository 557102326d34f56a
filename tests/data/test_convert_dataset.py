"""`convert_dataset_to_HDF5` writes files for our readers, with labels shifted for decoders."""

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from headwater.core.errors import DataError
from headwater.data import convert_dataset_to_HDF5
from headwater.data.reader import open_samples
from headwater.data.tokenizer import TrainBPE

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(book):
    trained = TrainBPE(300).train([book[:5000]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<|endoftext|>", eos_token="!"
    )


def test_labels_of_a_transformers_collator_are_shifted(tokenizer, tmp_path):
    """The loss on these rows counts the same labels as the loss of transformers."""
    texts = ["A first text.", "And a second, longer one."] * 5
    samples = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=32)
    out = tmp_path / "out"
    assert (
        convert_dataset_to_HDF5(samples, out, data_collator=collator, samples_per_file=4, batch_size=3) == 10
    )
    assert [path.name for path in sorted(out.iterdir())] == [
        f"dataset-partition-{n:05d}.h5" for n in range(3)
    ]
    rows = open_samples([out], vocab_size=300).__getitems__(list(range(10)))
    for row, sample in enumerate(samples):
        ids = sample["input_ids"]
        counted = rows["attention_mask"][row] == 1
        assert rows["labels"][row][counted].tolist() == ids[1:]
        assert rows["input_ids"][row][counted].tolist() == ids[:-1]


def test_shifted_labels_are_not_shifted_again(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 50, (7, 9))
    samples = [{"input_ids": row[:-1], "attention_mask": [1] * 7 + [0], "labels": row[1:]} for row in tokens]
    convert_dataset_to_HDF5(samples, tmp_path / "out")
    rows = open_samples([tmp_path / "out"]).__getitems__(list(range(7)))
    assert rows["labels"][:, :-1].equal(torch.from_numpy(tokens[:, 1:-1]))
    assert rows["attention_mask"].sum() == 49


def test_hugging_face_data_set_is_converted(tmp_path):
    datasets = pytest.importorskip("datasets")
    tokens = [[n, n + 1, n + 2, n + 3] for n in range(20)]
    made = datasets.Dataset.from_dict({"input_ids": tokens})
    for name, dataset in (("map", made), ("stream", made.to_iterable_dataset())):
        assert convert_dataset_to_HDF5(dataset, tmp_path / name) == 20
        rows = open_samples([tmp_path / name]).__getitems__([3])
        assert rows["labels"][0, :3].tolist() == [4, 5, 6]


class Counting(IterableDataset):
    def __iter__(self):
        return iter({"inputs": np.full((2, 3), n, dtype=np.float32), "labels": n} for n in range(5))


def test_other_fields_become_datasets(tmp_path):
    convert_dataset_to_HDF5(Counting(), tmp_path / "out", dtype="f4", compression=None)
    with h5py.File(tmp_path / "out/dataset-partition-00000.h5") as file:
        assert file["inputs"].shape == (5, 2, 3)
        assert file["labels"][:].tolist() == [0, 1, 2, 3, 4]


def test_error_names_the_field_that_cannot_be_stacked(tmp_path):
    with pytest.raises(DataError, match=r"(?s)'input_ids' cannot be stacked.*data_collator"):
        convert_dataset_to_HDF5([{"input_ids": [1]}, {"input_ids": [1, 2]}], tmp_path / "out")
    with pytest.raises(DataError, match="no samples"):
        convert_dataset_to_HDF5(iter([]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_collator_may_take_tuples(tmp_path):
    pairs = TensorDataset(torch.arange(12).view(6, 2), torch.arange(6))
    convert_dataset_to_HDF5(
        pairs, tmp_path / "out", data_collator=lambda part: {"x": torch.stack([first for first, _ in part])}
    )
    with h5py.File(tmp_path / "out/dataset-partition-00000.h5") as file:
        assert file["x"][:].tolist() == torch.arange(12).view(6, 2).tolist()
