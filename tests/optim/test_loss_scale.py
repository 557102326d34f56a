"""The loss scale, against the one of torch.amp."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.precision import Precision
from headwater.optim.loss_scale import GROWTH_INTERVAL, LARGEST, SMALLEST, LossScale


def test_a_static_scale_stays():
    scale = LossScale.of(Precision("fp16", 128.0))
    assert scale.after(applied=True) == scale.after(applied=False) == scale
    assert not scale.may_skip


@given(st.lists(st.booleans(), max_size=12), st.integers(0, GROWTH_INTERVAL - 1))
def test_a_dynamic_scale_follows_gradscaler(applied, good_steps):
    scale = LossScale(2.0**10, dynamic=True, good_steps=good_steps)
    value, tracker = torch.tensor(scale.value), torch.tensor(good_steps, dtype=torch.int32)
    for ok in applied:
        scale = scale.after(applied=ok)
        found = torch.tensor(0.0 if ok else 1.0)
        torch._amp_update_scale_(value, tracker, found, 2.0, 0.5, GROWTH_INTERVAL)
        assert (scale.value, scale.good_steps) == (max(value.item(), SMALLEST), tracker.item())


def test_a_dynamic_scale_has_limits():
    assert (
        LossScale(LARGEST, dynamic=True, good_steps=GROWTH_INTERVAL - 1).after(applied=True).value == LARGEST
    )
    least = LossScale(SMALLEST, dynamic=True)
    assert least.after(applied=False).value == SMALLEST
    assert not least.may_skip, "at its smallest the scale is not to blame any more"
