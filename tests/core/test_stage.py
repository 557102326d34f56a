"""The layout of parameters in a slab."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headwater.core.stage import SLAB_ALIGNMENT_BYTES, ParamSpec, StageSpec

SHAPE = st.lists(st.integers(0, 40), max_size=3).map(tuple)
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])


@st.composite
def stages(draw):
    params = draw(st.lists(st.tuples(SHAPE, DTYPE, st.booleans()), min_size=1, max_size=6))
    return StageSpec(
        0,
        "stage",
        tuple(
            ParamSpec(str(i), shape, torch.float32, dtype, requires_grad=grad)
            for i, (shape, dtype, grad) in enumerate(params)
        ),
    )


@settings(deadline=None)
@given(stages())
def test_views_are_aligned_and_apart(stage):
    slab = torch.zeros(stage.slab_bytes, dtype=torch.uint8)
    views = stage.views(slab)
    for index, (param, offset, view) in enumerate(zip(stage.params, stage.offsets, views, strict=True)):
        assert offset % SLAB_ALIGNMENT_BYTES == 0
        assert (tuple(view.shape), view.dtype) == (param.shape, param.wire_dtype)
        assert view.is_contiguous()
        view.fill_(index + 1)
    for index, view in enumerate(views):
        assert bool((view == index + 1).all())


@settings(deadline=None)
@given(stages())
def test_counts(stage):
    assert stage.numel == sum(torch.Size(param.shape).numel() for param in stage.params)
    assert stage.trainable_numel == sum(param.numel for param in stage.params if param.requires_grad)
    assert stage.slab_bytes % SLAB_ALIGNMENT_BYTES == 0
    filled = sum(param.wire_bytes for param in stage.params)
    if filled:
        assert 0 <= stage.slab_bytes - filled < SLAB_ALIGNMENT_BYTES * len(stage.params)
    else:
        assert stage.slab_bytes == SLAB_ALIGNMENT_BYTES


def test_a_slab_that_is_too_small_is_refused():
    stage = StageSpec(0, "s", (ParamSpec("w", (100,), torch.float32, torch.float32),))
    with pytest.raises(RuntimeError):
        stage.views(torch.empty(64, dtype=torch.uint8))
