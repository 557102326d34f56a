"""Collectives of `torch.distributed` among ranks: the default group, other groups, and refused calls."""

import pytest
import torch
import torch.distributed as dist
from tests.rank_processes import run_ranks
from torch.distributed import ReduceOp

from headwater.core.errors import RankError


def values(rank):
    return torch.arange(6.0).reshape(2, 3) * (rank + 1)


def collect(fabric):
    rank, size = fabric.rank, fabric.size
    found = {"name": dist.get_backend()}
    for operation in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        reduced = values(rank)
        dist.all_reduce(reduced, operation)
        found[str(operation).split(".")[-1]] = reduced
    every = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(every, values(rank))
    found["all_gather"] = torch.stack(every)
    into = torch.empty(size, 2, 3)
    dist.all_gather_into_tensor(into, values(rank))
    found["all_gather_into_tensor"] = into
    sent = values(rank)
    dist.broadcast(sent, src=1)
    found["broadcast"] = sent
    reduced = values(rank)
    dist.reduce(reduced, dst=2)
    found["reduce"] = reduced
    gathered = [torch.empty(2, 3) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank), gathered, dst=1)
    found["gather"] = gathered and torch.stack(gathered)
    own = torch.empty(2)
    dist.scatter(own, list(torch.arange(2.0 * size).split(2)) if rank == 0 else None, src=0)
    found["scatter"] = own
    piece = torch.empty(1)
    dist.reduce_scatter_tensor(piece, torch.arange(float(size)) + rank)
    found["reduce_scatter"] = piece
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
    found["all_to_all"] = swapped
    received = torch.empty(3)
    works = [
        dist.irecv(received, (rank - 1) % size),
        dist.isend(torch.full((3,), float(rank)), (rank + 1) % size),
    ]
    for work in works:
        work.wait()
    found["ring"] = received
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    some = dist.new_group([0, 2])
    if rank != 1:
        part = torch.ones(1)
        dist.all_reduce(part, group=some)
        found["some"] = part.item()
    dist.barrier()
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()
    }


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # its names, since torch 2.13
def test_collectives_return_the_documented_results():
    ranks = run_ranks(collect, count=3)
    every = torch.stack([values(rank) for rank in range(3)])
    for rank, found in enumerate(ranks):
        expected = {
            "SUM": every.sum(0),
            "AVG": every.mean(0),
            "MIN": every[0],
            "MAX": every[2],
            "PRODUCT": every.prod(0),
            "all_gather": every,
            "all_gather_into_tensor": every,
            "broadcast": every[1],
            "reduce": every.sum(0) if rank == 2 else every[rank],
            "gather": every if rank == 1 else None,
            "scatter": torch.arange(2.0) + 2 * rank,
            "reduce_scatter": torch.tensor([3.0 * rank + 3]),
            "all_to_all": torch.tensor([0.0, 10, 20]) + rank,
            "ring": torch.full((3,), float((rank - 1) % 3)),
        }
        for name, value in expected.items():
            assert found[name] == (None if value is None else value.tolist()), name
        assert found["objects"] == [{"rank": each} for each in range(3)]
        assert found["name"] == "headwater"
        assert found.get("some", 2.0) == 2.0


def test_invalid_collectives_are_refused_without_waiting():
    def ask(fabric):
        with pytest.raises(RankError, match=r"expected a tensor of shape \[2\] and torch.float32"):
            dist.all_gather([torch.empty(2)] * 2, torch.empty(2 + fabric.rank))
            dist.all_gather([torch.empty(2)] * 2, torch.empty(3 - fabric.rank))
        with pytest.raises(RuntimeError):  # its processes would rendezvous in a store
            dist.new_group(backend="gloo")

    run_ranks(ask)


def test_distributed_data_parallel_is_refused_with_a_remedy():
    def train(fabric):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with pytest.raises(RankError, match=r"DistributedDataParallel is not supported") as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert "without a wrapper" in str(caught.value)

    run_ranks(train)


def test_all_ranks_may_send_large_data_at_once():
    """The data exceed the system's buffers, so no rank may wait for the others to receive first."""

    def swap(fabric):
        own = torch.full((5_000_000,), float(fabric.rank))
        every = fabric.gather_tensors(own)
        link = fabric.connect("weights")
        into = [torch.empty(20_000_000, dtype=torch.uint8) for _ in range(2)]
        link.exchange([own.view(torch.uint8)] * 2, into)
        others = into[1 - fabric.rank].view(torch.float32)
        return [each[-1].item() for each in every], others.unique().tolist()

    assert run_ranks(swap, hosts=2) == [([0.0, 1.0], [1.0]), ([0.0, 1.0], [0.0])]
