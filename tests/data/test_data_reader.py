"""Batches: content, the same order for any workers and ranks, exact resumption, and errors."""

import itertools
import json

import h5py
import numpy as np
import pydantic
import pytest
import torch

from headwater.core.errors import ConfigError, DataError
from headwater.data.reader import GptHDF5DataProcessor, GptHDF5DataProcessorConfig, GptHDF5MapDataProcessor

LENGTH = 8


def write(path, array, name="data", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=array, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return folders with 23 samples in the public layout, written without this package."""
    folder = tmp_path_factory.mktemp("data")
    samples = np.arange(23 * 3 * LENGTH, dtype=np.int32).reshape(23, 3, LENGTH)
    write(folder / "a" / "output_chunk_0.h5", samples[:10], chunks=(1, 3, LENGTH), compression="gzip")
    write(folder / "a" / "output_chunk_1.h5", samples[10:11])
    write(folder / "b" / "data.hdf5", samples[11:])
    return folder, samples


def make(folder, *, rank=0, world_size=1, vocab_size=None, max_position_embeddings=None, **keys):
    folders = [folder / "a", folder / "b"] if (folder / "b").is_dir() else folder
    config = GptHDF5DataProcessorConfig(**{"data_dir": folders, "batch_size": 4, **keys})
    return GptHDF5DataProcessor(
        config,
        rank=rank,
        world_size=world_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )


def first(loader, count):
    return list(itertools.islice(loader, count))


def equal(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_batch_is_what_the_files_hold(data):
    folder, samples = data
    processor = make(folder)
    assert (processor.num_samples, processor.sequence_length) == (23, LENGTH)
    (batch,) = first(processor.create_dataloader(), 1)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    for channel, tensor in enumerate(batch.values()):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.tolist() == samples[:4, channel].tolist()


def test_epochs_follow_each_other_without_a_gap(data):
    folder, samples = data
    batches = first(make(folder, shuffle=True, shuffle_seed=3).create_dataloader(), 23)
    ids = torch.cat([batch["input_ids"][:, 0] for batch in batches]).reshape(4, 23)
    for epoch in ids:
        assert sorted(epoch.tolist()) == samples[:, 0, 0].tolist()
    assert len({tuple(epoch.tolist()) for epoch in ids}) == 4


def test_workers_do_not_change_the_batches(data):
    folder, _ = data
    plain = first(make(folder, shuffle=True).create_dataloader(), 12)
    equal(first(make(folder, shuffle=True, num_workers=2, prefetch_factor=3).create_dataloader(), 12), plain)


def test_ranks_share_each_batch(data):
    folder, _ = data
    whole = first(make(folder, shuffle=True).create_dataloader(), 9)
    ranks = [
        first(make(folder, shuffle=True, rank=rank, world_size=2).create_dataloader(), 9) for rank in (0, 1)
    ]
    joined = [{key: torch.cat([one[key], two[key]]) for key in one} for one, two in zip(*ranks, strict=True)]
    equal(joined, whole)


@pytest.mark.parametrize(("num_workers", "stops"), [(0, range(1, 14)), (2, [7])])
def test_resuming_continues_with_the_next_sample(data, num_workers, stops):
    """Workers have read ahead, but samples that were only read ahead do not count as consumed."""
    folder, _ = data
    whole = first(make(folder, shuffle=True, shuffle_seed=1).create_dataloader(), 14)
    for stop in stops:
        loader = make(folder, shuffle=True, shuffle_seed=1, num_workers=num_workers).create_dataloader()
        equal(first(loader, stop), whole[:stop])
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = make(folder, shuffle=True, shuffle_seed=1).create_dataloader()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        equal(first(resumed, 14 - stop), whole[stop:])


def test_resuming_with_another_batch_size_and_more_ranks_keeps_the_order(data):
    folder, _ = data
    before = make(folder, shuffle=True, batch_size=6).create_dataloader()
    ids = [batch["input_ids"] for batch in first(before, 3)]
    ranks = [make(folder, shuffle=True, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    loaders = [processor.create_dataloader() for processor in ranks]
    for loader in loaders:
        loader.load_state_dict(before.state_dict())
    for parts in zip(*(first(loader, 9) for loader in loaders), strict=True):
        ids += [part["input_ids"] for part in parts]
    whole = first(make(folder, shuffle=True, batch_size=12).create_dataloader(), 3)
    assert torch.equal(torch.cat(ids), torch.cat([batch["input_ids"] for batch in whole]))


def test_endless_loader_continues_where_iteration_stopped(data):
    folder, _ = data
    loader = make(folder).create_dataloader()
    equal(first(loader, 3) + first(loader, 4), first(make(folder).create_dataloader(), 7))
    with pytest.raises(TypeError, match="endless"):
        len(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_single_pass_starts_over_each_time(data, num_workers):
    folder, _ = data
    loader = make(folder, repeat=False, num_workers=num_workers).create_dataloader()
    passes = [list(loader), first(loader, 2), list(loader)]
    assert len(loader) == len(passes[0]) == 5
    equal(passes[1], passes[0][:2])
    equal(passes[2], passes[0])
    loader.load_state_dict({**loader.state_dict(), "samples_consumed": 12})
    equal(list(loader), passes[0][3:])
    equal(list(loader), passes[0])


def test_a_single_pass_may_keep_the_incomplete_batch(data):
    folder, _ = data
    loader = make(folder, repeat=False, drop_last=False).create_dataloader()
    assert [len(batch["labels"]) for batch in loader] == [4, 4, 4, 4, 4, 3]
    assert len(loader) == 6


def test_a_state_of_other_data_is_refused(data):
    folder, _ = data
    loader = make(folder, shuffle=True, shuffle_seed=1).create_dataloader()
    for key, value, story in (
        ("num_samples", 22, "with 22 samples, but this run has 23 samples"),
        ("shuffle", False, "with shuffle: false, but this run has shuffle: true"),
        # Most users set the seed of the run, and not the key `shuffle_seed` of a data section.
        ("shuffle_seed", 2, "with seed 2, but this run has seed 1"),
    ):
        with pytest.raises(DataError, match=f"the checkpoint was made {story}") as refused:
            loader.load_state_dict({**loader.state_dict(), key: value})
        assert "shuffle_seed" not in str(refused.value)


def test_the_map_processor_is_the_same_reader():
    assert GptHDF5MapDataProcessor is GptHDF5DataProcessor
    keys = {"data_processor": "GptHDF5MapDataProcessor", "data_dir": "x", "batch_size": 2}
    assert GptHDF5DataProcessorConfig(**keys).folders[0].name == "x"


@pytest.mark.parametrize("keys", [{"data_dir": []}, {"batch_size": 0}, {"shufle": True}, {"num_workers": -1}])
def test_a_wrong_key_or_value_is_refused(keys):
    with pytest.raises(pydantic.ValidationError, match=next(iter(keys))):
        GptHDF5DataProcessorConfig(**{"data_dir": "x", "batch_size": 2, **keys})


def test_error_names_a_missing_or_wrong_data_dir(tmp_path):
    (tmp_path / "set" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"(?s)does not exist.*data_dir: .*sett.*did you mean .*set\?"):
        make(tmp_path / "sett")
    with pytest.raises(DataError, match=r"(?s)no HDF5 files.*data_dir: .*write data_dir: .*train"):
        make(tmp_path / "set")
    with pytest.raises(DataError, match=r"(?s)no HDF5 files.*for example DIR/train"):
        make(tmp_path / "set" / "train")


GOOD = np.ones((4, 3, LENGTH), dtype=np.int32)


@pytest.mark.parametrize(
    ("array", "name", "message"),
    [
        (GOOD, "other", "no dataset 'data'; its datasets: 'other'"),
        (GOOD[:, 0], "data", r"shape \[samples, 3 or 5, sequence_length\], got \[4, 8\]"),
        (GOOD[:, :2], "data", r"got \[4, 2, 8\]"),
        (GOOD.astype(np.float32), "data", "expected integers in dataset 'data', got float32"),
        (GOOD[:0], "data", "holds no samples"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path, array, name, message):
    write(tmp_path / "set" / "bad.h5", array, name)
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path / "set")
    assert str(tmp_path / "set") in caught.value.where


def test_error_names_a_file_that_cannot_be_opened(tmp_path):
    write(tmp_path / "set" / "bad.h5", GOOD)
    content = (tmp_path / "set" / "bad.h5").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"not HDF5"):
        (tmp_path / "set" / "bad.h5").write_bytes(damaged)
        with pytest.raises(DataError, match=r"(?s)cannot be opened.*bad\.h5.*headwater data"):
            make(tmp_path / "set")


def test_error_names_the_damaged_sample(tmp_path):
    path = tmp_path / "set" / "bad.h5"
    write(path, np.arange(4 * 3 * LENGTH).reshape(4, 3, LENGTH), chunks=(1, 3, LENGTH), compression="gzip")
    with h5py.File(path) as file:
        chunk = file["data"].id.get_chunk_info(2)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(content)
    with pytest.raises(DataError, match="sample cannot be read") as caught:
        first(make(tmp_path / "set").create_dataloader(), 1)
    assert caught.value.where == f"{path}, sample 2"


def test_a_wrong_sequence_length_is_refused(tmp_path, data):
    folder, _ = data
    with pytest.raises(DataError, match=r"(?s)8 tokens, but max_sequence_length is 16.*--sequence_length 16"):
        make(folder, max_sequence_length=16)
    with pytest.raises(DataError, match=r"8 tokens, but the model reads at most 4"):
        make(folder, max_position_embeddings=4)
    assert make(folder, max_sequence_length=8, max_position_embeddings=16).sequence_length == 8
    write(tmp_path / "set" / "1.h5", GOOD)
    write(tmp_path / "set" / "2.h5", np.ones((4, 3, 2 * LENGTH), dtype=np.int32))
    with pytest.raises(DataError, match=r"(?s)samples have 16 tokens, but 8 in .*1\.h5.*2\.h5"):
        make(tmp_path / "set")


@pytest.mark.parametrize(("token", "channel", "num_workers"), [(100, 0, 0), (100, 2, 1), (-1, 0, 0)])
def test_error_names_the_sample_with_a_token_outside_the_vocabulary(tmp_path, token, channel, num_workers):
    write(tmp_path / "set" / "1.h5", GOOD)
    bad = GOOD.copy()
    bad[1, channel, 5] = token
    write(tmp_path / "set" / "2.h5", bad)
    loader = make(tmp_path / "set", vocab_size=100, num_workers=num_workers).create_dataloader()
    with pytest.raises(DataError, match=rf"expected token ids .* got {token}\n") as caught:
        first(loader, 2)
    assert caught.value.where == f"{tmp_path / 'set' / '2.h5'}, sample 1"
    assert "Traceback" not in str(caught.value)


def test_smaller_vocab_size_applies_and_masks_are_not_checked(tmp_path):
    array = GOOD.copy()
    array[:, 1] = 9
    write(tmp_path / "set" / "1.h5", array)
    first(make(tmp_path / "set", vocab_size=2).create_dataloader(), 1)
    with pytest.raises(DataError, match=r"(?s)vocab_size=1, got 1.*set vocab_size to at least 2"):
        first(make(tmp_path / "set", vocab_size=1, batch_size=2).create_dataloader(), 1)


def test_many_files_do_not_stay_open(tmp_path):
    for number in range(40):
        write(tmp_path / "set" / f"{number:02}.h5", GOOD[:1] * number)
    processor = make(tmp_path / "set", batch_size=1, repeat=False)
    seen = [batch["labels"][0, 0].item() for batch in processor.create_dataloader()]
    assert seen == list(range(40))
    assert len(processor.dataset._open_files._files) <= 16


def test_an_uneven_share_is_refused(data):
    with pytest.raises(ConfigError, match=r"(?s)batch_size 4 .*3 ranks.*write 3 or 6"):
        make(data[0], world_size=3)
