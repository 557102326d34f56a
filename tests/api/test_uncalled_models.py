"""A compiled model that the loop never calls is not streamed, and a warning says so."""

import warnings

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.compile import streamed
from headwater.api.step_hooks import NotStreamedWarning


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x))


def step(model, call, optimizer):
    optimizer.zero_grad()
    call(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("by", ["method", "functional_call"])
def test_training_without_a_call_of_the_module_warns(by):
    model = hw.compile(Autoencoder(), hw.backend("CSX", tier="memory", num_slabs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def functional(x):
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,))

    with pytest.warns(NotStreamedWarning, match="this compiled Autoencoder trains in plain PyTorch"):
        step(model, model.encode if by == "method" else functional, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamedWarning)
        step(model, model, optimizer)
        assert streamed(model).engine is not None
        step(model, model.encode, optimizer)


def test_other_models_and_released_ones_do_not_warn():
    waiting = hw.compile(Autoencoder(), "CSX")
    released = hw.compile(Autoencoder(), "CSX")
    hw.release(released)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamedWarning)
        for model in (Autoencoder(), released):
            params = [*model.parameters(), *waiting.parameters()]  # `waiting` gets no gradients
            step(model, model.encode, torch.optim.SGD(params, lr=0.1))
