"""Compiled blocks decide themselves what they save, so their plan computes no cheap operators again."""

import dataclasses

import pytest

from headwater.core.errors import DoesNotFitError
from headwater.plan.types import Activations, Blocks
from headwater.trainer.compile_choice import plan_with_blocks
from headwater.trainer.planning import Workload

KEEP, SELECTIVE, RECOMPUTE = Activations.KEEP, Activations.SELECTIVE, Activations.RECOMPUTE


@dataclasses.dataclass(frozen=True)
class PlanOf:
    """The parts of a plan that the choice reads and writes."""

    activations: tuple[Activations, ...]
    blocks: Blocks = dataclasses.field(default_factory=Blocks)


def planner(eager, compiled, asked):
    """Return a function that plans; it appends what it is asked for to `asked`."""

    def plan_for(work):
        asked.append(work.compiled)
        found = compiled if work.compiled else eager
        if found is None:
            raise DoesNotFitError("too small")
        return PlanOf(found)

    return plan_for


@pytest.mark.parametrize(
    ("eager", "choice", "found", "asked"),
    [
        ((SELECTIVE,), Blocks(True, "faster"), (RECOMPUTE,), [None, True]),
        ((SELECTIVE,), Blocks(False, "slower"), (SELECTIVE,), [None]),
        ((KEEP,), Blocks(True, "faster"), (KEEP,), [None]),
    ],
)
def test_compiled_blocks_get_another_plan_if_the_first_one_is_selective(eager, choice, found, asked):
    requests = []
    plan_for = planner(eager, (RECOMPUTE,), requests)
    plan = plan_with_blocks(Workload(1), plan_for, lambda plan: choice)
    assert (plan.activations, plan.blocks, requests) == (found, choice, asked)


def test_blocks_stay_eager_if_no_plan_of_compiled_blocks_fits():
    plan = plan_with_blocks(Workload(1), planner((SELECTIVE,), None, []), lambda plan: Blocks(True, "faster"))
    assert plan.activations == (SELECTIVE,)
    assert not plan.blocks.compiled and "does not fit" in plan.blocks.reason


def test_blocks_stay_eager_if_the_plan_of_compiled_blocks_has_no_room_for_the_compiler():
    def choose(plan):
        return Blocks(plan.activations == (SELECTIVE,), "memory")

    plan = plan_with_blocks(Workload(1), planner((SELECTIVE,), (RECOMPUTE,), []), choose)
    assert plan == PlanOf((SELECTIVE,), Blocks(False, "memory"))
