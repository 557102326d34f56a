"""Ranks on several hosts, which share memory only within a host, compute the numbers of ranks on one host."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import FP32
from rank_training import Net, plan_of, tokens, train
from tests.rank_processes import run_ranks

from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import ALONE
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.update import Update


class Choosing(Net):
    """A model that skips blocks, depending on the batch."""

    def chosen(self, tokens):
        return [block for index, block in enumerate(self.blocks) if index != int(tokens.sum()) % 6]


def trained(count, hosts, precision=FP32, micro_batches=1, net=Net):
    """Return the results of each rank."""
    plan = plan_of(precision, micro_batches, net)
    work = functools.partial(train, plan=plan, micro_batches=micro_batches, net=net)
    return run_ranks(work, count, hosts)


def assert_close(ours, theirs, rel):
    """Assert that two ranks saw the same up to this relative difference; 0 means the same bits."""
    assert len(ours[0]) == len(theirs[0])
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(other, rel=rel, abs=0)
    for name, value in theirs[1].items():
        allowed = np.maximum(100 * rel * np.abs(value), 1e-3 * bool(rel))
        assert ours[1][name].shape == value.shape, name
        assert (np.abs(ours[1][name] - value) <= allowed).all(), name


@pytest.mark.parametrize(("net", "precision"), [(Choosing, FP32), (Net, Precision("bf16"))])
def test_two_hosts_with_one_rank_each_equal_two_ranks_of_one_host(net, precision):
    one, two = trained(2, 1, precision, net=net), trained(2, 2, precision, net=net)
    for rank in two:
        assert_close(rank, one[0], rel=0)


def test_two_ranks_that_skip_blocks_equal_one_rank():
    plan = plan_of(FP32, 2, Choosing)

    def halves(step, index):
        return tokens(step, 0).chunk(2)[index]

    alone = train(ALONE, plan, 2, Choosing, halves)
    for rank in trained(2, 1, net=Choosing):
        assert_close(rank, alone, rel=1e-6)


@pytest.mark.parametrize("hosts", [2, 4])
def test_four_ranks_on_several_hosts_repeat_to_the_bit_and_differ_from_one_host_by_rounding(hosts):
    first, again, one = trained(4, hosts), trained(4, hosts), trained(4, 1)
    for rank in first:
        assert_close(rank, again[0], rel=0)
        assert_close(rank, one[0], rel=1e-5)


STAGE = StageSpec(0, "matrix", (ParamSpec("weight", (8,), torch.float32, torch.float32),))


def descend(fabric):
    """Take one step of gradient descent with two gradients of the same micro-batch."""
    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    store = build_store([STAGE], rule, lambda own: MemoryTier(own.layouts, fabric=fabric), fabric=fabric)
    store.parameters.write(0, lambda piece: piece.master.zero_())
    store.begin_step()
    for value in (1.0, 10.0):
        store.add_gradient((0, 0), torch.full((8,), value * (fabric.rank + 1)), last=True)
    store.end_micro_batch()
    norm = store.commit(Update(1, {"lr": 1.0})).gradient_norm
    store.flush()
    fabric.barrier("the others")
    return norm, store.tier.resident_wire(0)[:32].view(torch.float32).tolist()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_second_gradient_of_a_micro_batch_is_sent_to_all_hosts(hosts):
    for norm, weights in run_ranks(descend, 2, hosts):
        assert weights == [-33.0] * 8
        assert norm == pytest.approx(33 * 8**0.5)


def shared_bytes():
    """Return how many bytes of memory that ranks share this process has mapped."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
             if "memfd:headwater" in line]  # fmt: skip
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def allocate_again(fabric):
    """Return what each rank finds in memory that rank 0 filled, and how much more is mapped at the end."""
    before, found = shared_bytes(), []
    for number in range(1, 4):
        memory = fabric.allocate(1 << 20)
        assert not memory.any(), "new memory is zero"
        fabric.barrier("all to have looked")
        if fabric.rank == 0:
            memory.fill_(number)
        fabric.barrier("it to be filled")
        found.append(int(memory[-1]))
        assert shared_bytes() == before + (1 << 20)
        del memory
    return found, shared_bytes() - before


def test_memory_that_no_rank_uses_is_freed():
    assert run_ranks(allocate_again, 2) == [([1, 2, 3], 0)] * 2


def test_ranks_of_one_host_gather_only_from_that_host():
    def told(fabric):
        return fabric.neighbours.gather_objects(fabric.rank, int), fabric.neighbours.gather(
            float(fabric.rank)
        )

    assert run_ranks(told, 3, 2) == [([0, 1], [0.0, 1.0]), ([0, 1], [0.0, 1.0]), ([2], [2.0])]
