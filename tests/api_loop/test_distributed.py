"""The task number of each rank, by which ranks divide the data."""

import os

import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from headwater import distributed


def test_a_single_process_is_the_only_task():
    assert (distributed.num_tasks(), distributed.task_id(), distributed.get_ordinal()) == (1, 0, 0)
    assert distributed.num_available() == len(os.sched_getaffinity(0)) and not distributed.is_streamer()


def test_ranks_of_torch_distributed_are_tasks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        assert (distributed.num_tasks(), distributed.task_id(), distributed.get_ordinal()) == (4, 2, 2)
    finally:
        torch.distributed.destroy_process_group()
