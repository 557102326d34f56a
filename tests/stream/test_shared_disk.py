"""Weights on disk, all or some, have the bits of weights in memory on several ranks and hosts."""

import dataclasses
import functools

import pytest
from harness import FP32
from rank_training import Net, plan_of, train, wire
from test_several_hosts import Choosing
from tests.rank_processes import run_ranks

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.precision import Precision

BF16 = Precision("bf16")
IN_MEMORY = (0, 2, 5)
"""Stages that stay in memory beside the disk tier."""


def fetched(engine):
    """Return all weights in their wire dtype on ranks that read the disk, and nothing on other ranks."""
    engine.store.flush()
    weights = []
    for stage in engine.store.stages if engine.fabric.local_rank == 0 else ():
        image = aligned_empty(engine.store.tier.layouts[stage.index].wire_bytes)
        engine.store.fetch(stage.index, image)
        specs = [spec.name for spec in stage.params]
        weights += [(name, value.clone()) for name, value in zip(specs, stage.views(image), strict=True)]
    return weights


@pytest.fixture
def small_blocks(monkeypatch):
    """Make pieces, groups and blocks so small that a stage has many, and hosts' parts begin within pages."""
    monkeypatch.setattr("headwater.store.layout.PIECE_ELEMENTS", 60)
    monkeypatch.setattr("headwater.store.layout.GROUP_BYTES", PAGE_BYTES)
    monkeypatch.setattr("headwater.store.disk._WIRE_BLOCK_BYTES", PAGE_BYTES)


@pytest.mark.parametrize(
    ("ranks", "hosts", "num_memx", "precision", "micro_batches", "net", "on_disk"),
    [
        (2, 2, 0, FP32, 1, Net, "weights"),
        (2, 2, 0, BF16, 2, Choosing, "both"),
        (2, 1, 0, FP32, 1, Choosing, "both"),
        (2, 1, 0, BF16, 2, Net, "gradients"),
        (3, 3, 1, BF16, 1, Net, "both"),
        (4, 2, 0, FP32, 1, Net, "weights"),
        (4, 2, 0, FP32, 2, Choosing, "gradients"),
        (4, 2, 2, BF16, 1, Net, "weights"),
        (4, 2, 3, FP32, 2, Net, "both"),
        (3, 1, 1, BF16, 2, Choosing, "both"),
        (3, 1, 2, FP32, 1, Net, "weights"),
        (2, 1, 0, FP32, 1, Net, "some weights"),
        (2, 1, 0, BF16, 2, Choosing, "some weights"),
        (4, 2, 0, FP32, 1, Choosing, "some weights"),
        (3, 1, 1, BF16, 2, Net, "some weights"),
        (4, 2, 2, FP32, 1, Net, "some weights"),
    ],
)
def test_weights_on_disk_equal_weights_in_memory(
    ranks, hosts, num_memx, precision, micro_batches, net, on_disk, small_blocks, tmp_path
):
    memory = plan_of(precision, micro_batches, net)
    here: dict[str, object] = {"disk": tmp_path}
    if on_disk != "gradients":
        here |= {"tier": "disk", "in_place": False, "slabs": 4 * ranks // hosts}
    if on_disk == "some weights":
        here["in_memory"] = IN_MEMORY
    elif on_disk != "weights":
        here["gradient_tier"] = "disk"
    disk = dataclasses.replace(memory, **here)
    work = functools.partial(train, micro_batches=micro_batches, net=net)
    wanted = run_ranks(functools.partial(work, plan=memory, read=wire), ranks, hosts, num_memx)
    read = wire if on_disk == "gradients" else fetched
    found = run_ranks(functools.partial(work, plan=disk, read=read, verify_disk=True), ranks, hosts, num_memx)
    for (told, weights), (other_told, other_weights) in zip(found, wanted, strict=True):
        assert told == other_told
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
    assert sum(bool(weights) for _, weights in found) == (ranks if on_disk == "gradients" else hosts)
    assert not list(tmp_path.iterdir()), "files of the disk tier have no names"
