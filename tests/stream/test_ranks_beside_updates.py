"""Masks and moving averages are the same for any number of hosts and any tier of the weights."""

import dataclasses
import functools

import pytest
import torch
from harness import FP32, SEED
from rank_training import Net, plan_of, tokens, train, wire
from test_several_hosts import assert_close
from test_shared_disk import BF16, fetched, small_blocks
from tests.rank_processes import run_ranks
from torch import nn

from headwater.fabric.fabric import ALONE
from headwater.sparsity.schedules import Cadence, Constant, Linear
from headwater.sparsity.sparsifier import Part, Sparsifier, Sparsity
from headwater.trainer.averages import MovingAverages
from headwater.trainer.job import Average
from headwater.trainer.sparse import SparseTraining

__all__ = ["small_blocks"]

GROUPS = [
    Sparsity(Constant(0.6), "rigl", "random", Constant(0.3), Cadence(1), ("*.up.weight", "some")),
    Sparsity(Linear(0.2, 0.2), "gmp", "topk", None, Cadence(1), ("*.down.weight",)),
    Sparsity(Constant(0.5), param_filter=("student.head.weight",)),
]


class Short(Net):
    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:3]


class Taught(nn.Module):
    """A student, and a teacher that is its moving average; the stage of `gain` also holds its average."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Short(), Short().requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(3))
        self.mean_gain = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens):
        with torch.no_grad():
            taught = self.teacher(tokens)
        return self.gain.prod() * self.student(tokens) + self.mean_gain.sum() * taught / 30


def beside(engine):
    """Return functions that mask the student's weights in several ways and let the teacher follow it."""
    specs = [spec for stage in engine.store.stages for spec in stage.params if spec.requires_grad]
    shapes = {spec.name: torch.Size(spec.shape) for spec in specs}
    parts = {"student.blocks.1.up.weight": [Part("some", slice(0, 9)), Part("rest", slice(9, None))]}
    sparsifier = Sparsifier(GROUPS, shapes, parts=parts, seed=SEED)
    sparse = SparseTraining(sparsifier, engine.store)
    sparse.begin()
    pairs = ("student.", "teacher."), ("gain", "mean_gain")
    averages = MovingAverages(engine.store, [Average(*pair, lambda step: 0.5 + step / 10) for pair in pairs])

    def after_step(step):
        averages.after_update(step + 1)
        if step == 2:
            check_masks(sparsifier, engine)

    return lambda update: sparse.before_update(update.step + 1), after_step


def check_masks(sparsifier, engine):
    """Assert that masked weights are zero on every rank that reads all weights."""
    seen = dict(fetched(engine) if engine.plan.tier == "disk" else wire(engine))
    for name in sparsifier.names if seen else ():
        assert not seen[name][~sparsifier.mask_of(name)].any(), name
        assert seen[name].any(), name


def trained(ranks, hosts, num_memx, precision, micro_batches, disk=None):
    """Return the results of each rank, with weights in memory or on disk."""
    plan = plan_of(precision, micro_batches, Taught)
    options = {}
    if disk is not None:
        here = {"tier": "disk", "in_place": False, "disk": disk, "slabs": 4 * ranks // hosts}
        here["gradient_tier"] = "disk"
        plan, options = dataclasses.replace(plan, **here), {"read": fetched, "verify_disk": True}
    work = functools.partial(
        train, plan=plan, micro_batches=micro_batches, net=Taught, beside=beside, **options
    )
    return run_ranks(work, ranks, hosts, num_memx)


@pytest.mark.parametrize(
    ("ranks", "hosts", "num_memx", "precision", "micro_batches"),
    [
        (2, 1, 0, FP32, 1),
        (4, 1, 2, BF16, 2),
        (4, 2, 0, FP32, 2),
        (4, 2, 2, BF16, 1),
    ],
)
def test_the_disk_tier_equals_the_memory_tier(
    ranks, hosts, num_memx, precision, micro_batches, small_blocks, tmp_path
):
    placed = ranks, hosts, num_memx, precision, micro_batches
    memory, disk = trained(*placed), trained(*placed, tmp_path)
    for (told, weights), (other_told, other_weights) in zip(disk, memory, strict=True):
        assert told == other_told
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
    for told, weights in memory:  # every host has all weights, averages too
        assert [each[:2] for each in told] == [each[:2] for each in memory[0][0]]
        for name, value in memory[0][1].items():
            assert (value == weights[name]).all(), name
    assert sum(bool(weights) for _, weights in disk) == hosts


def test_two_ranks_equal_one_and_two_hosts_equal_one(small_blocks):
    def halves(step, index):
        return tokens(step, 0).chunk(2)[index]

    alone = train(ALONE, plan_of(FP32, 2, Taught), 2, Taught, halves, beside=beside)
    assert (alone[1]["mean_gain"] != 1).all()
    assert not (alone[1]["teacher.head.weight"] == alone[1]["student.head.weight"]).all()
    two, hosts = trained(2, 1, 0, FP32, 1), trained(2, 2, 0, FP32, 1)
    for rank in (*two, *hosts):
        assert_close(rank, alone, rel=1e-5)
