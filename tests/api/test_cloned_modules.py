"""Modules that share the attributes of a streamed module, as libraries for meta learning make them."""

import copy

import pytest
import torch
from any_loop import adamw, check, extreme_plans, randn
from torch import nn


def clone_of(module):
    """Return a module with the attributes of `module`, and with clones of its parameters in the graph."""
    found = module.__new__(type(module))
    found.__dict__ = module.__dict__.copy()
    found._parameters = {name: param.clone() for name, param in module._parameters.items()}
    found._modules = {name: clone_of(child) for name, child in module._modules.items()}
    return found


def adapt(module, loss, rate=0.1):
    """Subtract the gradient of a loss from the clones, as a part of the graph."""
    places = [(part, name) for part in module.modules() for name in part._parameters]
    values = [part._parameters[name] for part, name in places]
    gradients = torch.autograd.grad(loss, values, create_graph=True)
    for (part, name), value, gradient in zip(places, values, gradients, strict=True):
        part._parameters[name] = value - rate * gradient


def trained(optimizer, loss_of):
    """Train for three steps; return the losses."""
    losses = []
    for number in range(3):
        loss = loss_of(randn(3, 4, seed=number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))


@extreme_plans
@pytest.mark.parametrize("is_planned", [False, True])
def test_clones_compute_with_their_own_weights(plan, is_planned, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = adamw(model.parameters())
        if is_planned:
            model(randn(3, 4, seed=9)).square().mean().backward()

        def loss_of(x):
            clone = clone_of(model)
            for _ in range(2):
                adapt(clone, clone(x).square().mean())
            return (clone(x) - 1).square().mean() + model(x).mean()

        return trained(optimizer, loss_of), model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_shallow_copy_with_another_layer(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = adamw(model.parameters())
        first = model(randn(3, 4, seed=9)).sum().item()
        other = copy.copy(model)
        other._modules = {**model._modules, "1": nn.Tanh()}
        losses = trained(optimizer, lambda x: other(x).square().mean() + model(x).mean())
        return first, losses, model, optimizer

    check(script, plan, tmp_path)
