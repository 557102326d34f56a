"""Who reads which share of the data."""

import torch.distributed

from headwater import distributed


def test_one_process_reads_all():
    assert (distributed.num_tasks(), distributed.task_id(), distributed.get_ordinal()) == (1, 0, 0)
    assert distributed.num_available() == 1 and not distributed.is_streamer()


def test_ranks_of_torch_distributed_share(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert (distributed.num_tasks(), distributed.task_id()) == (1, 0)
    finally:
        torch.distributed.destroy_process_group()
