"""Data workers without shared memory for their batches."""

import resource

import pytest
import torch

from headwater.core.errors import DataError
from headwater.data.loader import BatchLoader, Workers
from headwater.data.order import SampleOrder


class WithoutMemory:
    """Samples whose worker processes cannot make files of more than 1 KiB, in shared memory or elsewhere."""

    def __getitems__(self, draws):
        if torch.utils.data.get_worker_info() is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        return {"tokens": torch.zeros(len(draws), 1024)}


def test_a_batch_that_does_not_fit_into_shared_memory_is_an_error():
    order = SampleOrder(8, 4, shuffle=False, seed=0)
    assert next(iter(BatchLoader(WithoutMemory(), order)))["tokens"].shape == (4, 1024)
    loader = BatchLoader(WithoutMemory(), order, Workers(1))
    with pytest.raises(DataError, match="a data worker has no shared memory for its batch") as caught:
        next(iter(loader))
    assert caught.value.where == "/dev/shm"
