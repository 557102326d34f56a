"""A mixed tier holds the bytes of each stage in the tier of that stage."""

import pytest
import torch
from tests.on_device import device_tier

from headwater.core.buffers import aligned_empty
from headwater.core.errors import DiskFullError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.mixed import MixedTier
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.tier import all_pages, no_pages

STAGES = [
    StageSpec(
        index, f"stage{index}", (ParamSpec(f"{index}.w", (100 + index, 7), torch.float32, torch.bfloat16),)
    )
    for index in range(5)
]
LAYOUTS = [stage_layout(stage, UpdateRule(OptimizerSpec("AdamW", {"lr": 1e-3}))) for stage in STAGES]
IN_MEMORY, ON_DEVICE = {1, 4}, {2}


@pytest.fixture
def tier(tmp_path):
    def of(kind, **options):
        return lambda stages: kind([LAYOUTS[stage] for stage in stages], **options)

    tier = MixedTier(
        LAYOUTS,
        [
            (sorted(ON_DEVICE), of(device_tier)),
            (sorted(IN_MEMORY), of(MemoryTier)),
            (sorted({*range(5)} - IN_MEMORY - ON_DEVICE), of(DiskTier, folder=tmp_path)),
        ],
    )
    yield tier
    tier.close()


def image(tier, stage, *, value=None):
    """Return a buffer for the wire image of a stage, with random bytes or one value."""
    buffer = aligned_empty(tier.layouts[stage].wire_bytes)
    return buffer.random_(0, 255) if value is None else buffer.fill_(value)


def test_only_stages_of_the_memory_tier_are_resident(tier):
    assert {stage for stage in range(5) if tier.resident_wire(stage) is not None} == IN_MEMORY
    assert {stage for stage in range(5) if tier.on_device(stage) is not None} == ON_DEVICE


def test_every_stage_keeps_its_own_bytes(tier):
    torch.manual_seed(0)
    wires = [image(tier, stage) for stage in range(5)]
    rests = []
    for stage, wire in enumerate(wires):
        tier.write_wire(stage, wire)
        for _, rest in tier.groups(stage, tier.layouts[stage].groups, read=no_pages, write=all_pages):
            rest.random_(0, 255)
            rests.append((stage, rest.clone()))
    tier.settle()
    for stage, wire in enumerate(wires):
        found = image(tier, stage, value=0)
        tier.read_wire(stage, found)
        assert torch.equal(found, wire)
        groups = tier.groups(stage, tier.layouts[stage].groups)
        for (_, rest), (owner, expected) in zip(groups, [r for r in rests if r[0] == stage], strict=True):
            assert owner == stage
            assert torch.equal(rest, expected)


def test_the_first_tier_is_closed_if_the_second_cannot_be_made():
    closed = []

    class Closing(MemoryTier.__base__):
        is_here = resident_wire = read_wire = write_wire = groups = settle = on_device = None

        def close(self):
            closed.append(self)

    def full(stages):
        raise DiskFullError("there is no room", remedy="free some")

    with pytest.raises(DiskFullError):
        MixedTier(LAYOUTS, [([1, 4], lambda stages: Closing(LAYOUTS)), ([0, 2, 3], full)])
    assert len(closed) == 1
