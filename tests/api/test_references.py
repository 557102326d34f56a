"""Tensors that a script made from parameters before the first forward."""

import warnings

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.references import StaleTensorWarning


def compiled():
    return hw.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), hw.backend("CSX"))


@pytest.mark.parametrize(
    "take",
    [
        lambda model: model[0].weight.detach(),
        lambda model: model[0].weight.data[:2],
        lambda model: model.state_dict(),
        lambda model: model[0].weight.detach().numpy(),
    ],
    ids=["detach", "view", "state_dict", "numpy"],
)
def test_a_warning_names_tensors_taken_before_the_first_forward(take):
    model = compiled()
    kept = take(model)
    with pytest.warns(StaleTensorWarning, match=r"made of 0\.weight.* before the first forward keeps"):
        model(torch.randn(3, 4))
    assert kept is not None


def test_copies_and_deleted_tensors_cause_no_warning():
    model = compiled()
    kept = [model[0].weight.detach().clone(), model[0].weight.t, [p.shape for p in model.parameters()]]
    model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert kept
