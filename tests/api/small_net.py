"""A small network whose second weight is not row-major, and a step that trains it."""

import torch
from any_loop import randn
from torch import nn


def net():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with torch.no_grad():
        model[1].weight.data = model[1].weight.t()  # dense, but not row-major
    return model


def step(model, optimizer):
    model(randn(3, 6, seed=1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
