"""Uses of stages, and the modules that read them."""

from headwater.core.stage import StageSpec
from headwater.plan.partition import Partition, Unit
from headwater.plan.reads import WeightReads

UNITS = (Unit("embedding", False), Unit("blocks.0", False), Unit("blocks.1", False), Unit("", True))
STAGES = Partition(tuple(StageSpec(index, unit.path, ()) for index, unit in enumerate(UNITS)), UNITS)


def reads_of(*calls):
    """Return the record of forwards; a call is the path of a module, its stage, and the stages it reads."""
    reads = WeightReads(STAGES)
    reads.enter("", None)
    for path, stage, read in calls:
        reads.enter(path, stage)
        for each in read:
            reads.read(each)
        reads.leave(stage)
    reads.leave(None)
    return reads


def test_a_use_lasts_until_another_stage_is_read():
    reads = reads_of(("embedding", 0, [0]), ("blocks.0", 1, [1, 1, 1]), ("embedding", 0, [0]))
    assert reads.uses == [0, 1, 0]


def test_the_site_of_a_stage_is_its_module_where_that_runs_and_else_the_reader():
    reads = reads_of(("blocks.0", 1, [1]), ("blocks.1", 2, [2, 0]))
    assert reads.sites() == {"blocks.0": (1,), "blocks.1": (0, 2), "embedding": (0,), "": (3,)}


def test_reads_outside_of_all_forwards_do_not_count():
    reads = WeightReads(STAGES)
    assert not reads.read(1)
    assert reads.uses == []


def test_running_stages_are_those_of_open_forwards():
    reads = WeightReads(STAGES)
    reads.enter("blocks.0", 1)
    reads.enter("blocks.0.linear", None)
    assert reads.running == [1]
    reads.leave(None)
    reads.leave(1)
    assert reads.running == []


def test_a_stage_takes_over_the_sites_of_an_equal_one():
    reads = reads_of(("blocks.0.linear", None, [1]))  # called from outside of the block
    reads.take_over(2, 1, "blocks.1", "blocks.0")
    assert reads.sites()["blocks.0.linear"] == (1,)
    assert reads.sites()["blocks.1.linear"] == (2,)


def test_reads_of_a_part_and_of_the_block_around_it_in_turn_are_one_use():
    parts = (StageSpec(0, "block.up", (), 2), StageSpec(1, "block.down", (), 2), StageSpec(2, "block", ()))
    units = tuple(Unit(stage.name, False) for stage in parts)
    reads = WeightReads(Partition(parts, units))
    reads.enter("block", 2)
    for stage in (2, 2, 0, 2, 0, 2, 1, 2, 1):
        reads.read(stage)
    assert reads.uses == [2, 0, 2, 1]
