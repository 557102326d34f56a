"""Transforms of torch.func in the forward of a streamed model are refused; torch.autograd.grad is equal."""

import pytest
import torch
from torch import nn

import headwater
from headwater.core.errors import StreamError


def by_transform(energy, x):
    return torch.func.grad(energy)(x)


def by_autograd(energy, x):
    return torch.autograd.grad(energy(x), x, create_graph=True)[0]


class Descends(nn.Module):
    """Takes a step down an energy."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient
        self.first, self.energy = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return x - self.gradient(lambda v: self.energy(v).tanh().square().sum(), x)


def losses(gradient, options=None):
    torch.manual_seed(0)
    model = Descends(gradient)
    if options is not None:
        headwater.compile(model, headwater.backend("CSX", **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    found = []
    for step in range(2):
        loss = model(torch.ones(2, 4) * step).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("options", [{}, {"tier": "memory", "num_slabs": 2, "activations": "recompute"}])
def test_a_transform_is_refused_and_the_remedy_works(options):
    with pytest.raises(StreamError, match=r"(?s)torch\.func.*where: Descends.*torch\.autograd\.grad"):
        losses(by_transform, options)
    more = {**options, "num_slabs": 4} if options else {}
    assert losses(by_autograd, more) == losses(by_autograd)
