"""Plans of sparse training: masked weights take only the bytes that their store takes."""

import pytest
from synthetic import gpt

from headwater.core.errors import DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.step_trace import MaskedWeights
from headwater.plan.types import Resources
from headwater.store.disk import file_sizes, staging_bytes
from headwater.store.rule import UpdateRule, stage_layout

LAYERS, WIDTH = 24, 1024
SIZES = {"qkv": 3 * WIDTH**2, "out": WIDTH**2, "up": 4 * WIDTH**2, "down": 4 * WIDTH**2}
KEPT = {f"blocks.{block}.{name}": size // 10 for block in range(LAYERS) for name, size in SIZES.items()}
"""Masked parameters -> the elements that their masks keep, a tenth."""


def planned(resources, precision="bf16", **changes):
    arguments = {
        "batch_size": 4,
        "precision": Precision(precision),
        "optimizer_state_bytes": 8,
        "base_bytes": 100 * MIB,
    }
    shape = gpt(layers=LAYERS, hidden=WIDTH, precision=precision)
    return make_plan(PlanRequest(shape, resources=resources, **(arguments | changes)))


def layouts_of(plan):
    return [stage_layout(stage, UpdateRule(OptimizerSpec("AdamW"))) for stage in plan.trace.stages]


@pytest.mark.parametrize(("precision", "state"), [("bf16", 10), ("fp32", 8)])
def test_masked_weights_have_the_bytes_of_their_layout(precision, state):
    masks = MaskedWeights(LAYERS * sum(SIZES.values()) // 8, max(SIZES.values()))
    resources = Resources(host_memory=32 * GIB)
    dense, sparse = planned(resources, precision), planned(resources, precision, kept=KEPT, masks=masks)
    for plan in (dense, sparse):
        stored = sum(layout.wire_bytes + layout.rest_bytes for layout in layouts_of(plan))
        assert plan.prediction.host_parts["weight store"] == pytest.approx(stored, rel=1e-3)
    saved = dense.prediction.host_parts["weight store"] - sparse.prediction.host_parts["weight store"]
    masked = LAYERS * sum(SIZES.values())
    assert saved == pytest.approx(0.9 * state * masked, rel=1e-2)
    assert sparse.prediction.host_parts["masks"] >= masked // 8
    assert "masks" not in dense.prediction.host_parts


def test_files_and_their_buffers_are_those_of_the_plan(tmp_path):
    resources = Resources(host_memory=2 * GIB, disk=tmp_path, disk_bytes=16 * GIB)
    plan = planned(resources, kept=KEPT, fixed=Fixed("disk"))
    layouts = layouts_of(plan)
    files = file_sizes(layouts, tmp_path, [layout.groups for layout in layouts])
    assert plan.prediction.disk_parts["weight store"] == pytest.approx(sum(files.values()), rel=1e-3)
    assert plan.prediction.host_parts["staging"] >= staging_bytes(layouts)


def test_a_budget_that_is_too_small_for_all_state_fits_that_of_kept_weights():
    resources = Resources(host_memory=2 * GIB)
    with pytest.raises(DoesNotFitError):
        planned(resources)
    plan = planned(resources, kept=KEPT)
    assert plan.tier == "memory"
    assert plan.prediction.host_bytes <= 2 * GIB


def test_state_in_bf16_is_kept_for_all_weights():
    resources = Resources(host_memory=32 * GIB)
    plan = planned(resources, kept=KEPT, fixed=Fixed(optimizer_state="bf16"), optimizer_state_bytes=4)
    assert all(param.kept is None for stage in plan.trace.stages for param in stage.params)
