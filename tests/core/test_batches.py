"""Batches of any structure: their number of samples, micro-batches, and checksums."""

import pytest
import torch

from headwater.core.batches import equal_share, fingerprint, num_samples, slice_batch, split_batch
from headwater.core.errors import ConfigError, DataError

BATCH = {"x": torch.arange(10).view(5, 2), "y": [torch.arange(5), "text"], "scale": torch.tensor(2.0)}


def test_the_first_tensor_with_a_dimension_has_the_number_of_samples():
    assert num_samples(BATCH) == 5
    assert num_samples((torch.tensor(1.0), torch.zeros(3, 2))) == 3
    with pytest.raises(DataError, match="a tensor"):
        num_samples({"text": "none"})


def test_micro_batches_have_all_samples_in_order():
    parts = list(split_batch(BATCH, 2))
    assert [num_samples(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["x"] for part in parts]), BATCH["x"])
    assert all(part["scale"] is BATCH["scale"] and part["y"][1] == "text" for part in parts)


def test_a_small_batch_is_one_micro_batch_and_the_same_object():
    assert next(split_batch(BATCH, 5)) is BATCH


def test_tensors_with_another_first_dimension_stay_whole():
    batch = (torch.arange(4), torch.arange(3))
    first, second = slice_batch(batch, 1, 3)
    assert first.tolist() == [1, 2] and second is batch[1]


def test_checksums_tell_batches_apart():
    same = {"x": BATCH["x"].clone(), "y": [BATCH["y"][0].clone(), "other"], "scale": torch.tensor(2.0)}
    other = {**BATCH, "x": BATCH["x"] + 1}
    assert fingerprint(BATCH) == fingerprint(same) != fingerprint(other)


def test_a_batch_is_divided_evenly_or_refused():
    assert equal_share(12, 4) == 3
    with pytest.raises(ConfigError) as error:
        equal_share(10, 4)
    assert error.value.remedy == "write 8 or 12"
