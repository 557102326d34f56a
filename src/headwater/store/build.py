"""Construction of a weight store from its tier, gradients and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.core.cleanup import on_failure
from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.store.gradients import GradientOptions, make_gradients
from headwater.store.ownership import Ownership
from headwater.store.rule import UpdateRules, stage_layout
from headwater.store.store import WeightStore
from headwater.store.tier import Tier


def build_store(
    stages: Sequence[StageSpec],
    rule: UpdateRules,
    make_tier: Callable[[Ownership], Tier],
    *,
    on_disk: bool = False,
    gradients: GradientOptions | None = None,
    order: Sequence[ParamKey] | None = None,
    fabric: Fabric = ALONE,
) -> WeightStore:
    """Return the weight store that this rank uses.

    Args:
        stages: the stages.
        rule: how parameters are updated.
        make_tier: returns the tier of the layouts in an `Ownership`.
        on_disk: true if the tier keeps stages in files.
        gradients: how gradients are summed.
        order: every parameter in the model's order, in which norms are combined.
        fabric: the ranks that train together.
    """
    gradients = gradients or GradientOptions()
    # A user's loop reads and changes weights at any time, so each host has all of them.
    ranks = fabric.neighbours if gradients.user_loop else fabric
    layouts = [stage_layout(stage, rule) for stage in stages]
    ownership = Ownership(layouts, ranks.rank, ranks.placement, ranks.hosts, on_disk=on_disk)
    tier = make_tier(ownership)
    with on_failure(tier.close):  # there may be no room for the gradients: give the tier's room back
        sink = make_gradients(stages, fabric, ownership.host_run, gradients)
    return WeightStore(rule, tier, ownership, sink, order=order, fabric=ranks)
