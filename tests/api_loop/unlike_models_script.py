"""A script whose model changes on rank 1 only, in several ways: unlike_models_script.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import headwater as hw
from headwater.core.errors import HeadwaterError


def layer_of_the_same_shape(model):
    model[2] = nn.Linear(8, 8)


def layer_without_bias(model):
    model[2] = nn.Linear(8, 8, bias=False)


def activation(model):
    model[1] = nn.ReLU()


def added_parameter(model):
    model.register_parameter("more", nn.Parameter(torch.ones(2)))


def removed_layer(model):
    del model[3]


def unfrozen_parameter(model):
    model[0].weight.requires_grad_(True)


def no_change(model):
    """Leave the model as it is: the ranks still agree after the errors before."""


CHANGES = (
    layer_of_the_same_shape,
    layer_without_bias,
    activation,
    added_parameter,
    removed_layer,
    unfrozen_parameter,
    no_change,
)


def outcome_of(change, backend):
    """Return the message of the second step, or `trained`."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    layers[0].weight.requires_grad_(False)
    model = hw.compile(layers, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    try:
        for step in range(2):
            optimizer.zero_grad()
            model(hw.distributed.take_part(torch.randn(4, 4))).square().mean().backward()
            optimizer.step()
            if step == 0 and hw.distributed.task_id() == 1:
                change(model)
    except HeadwaterError as error:
        return str(error)
    return "trained"


def outcome_of_sparse(backend):
    """Return the message of a step with an embedding that has sparse gradients, or `trained`."""
    model = hw.compile(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), backend)
    try:
        model(hw.distributed.take_part(torch.arange(8))).square().mean().backward()
    except HeadwaterError as error:
        return str(error)
    return "trained"


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = hw.backend("CSX", num_csx=2)
    outcomes = {each.__name__: outcome_of(each, chosen) for each in CHANGES}
    outcomes["sparse"] = outcome_of_sparse(chosen)
    (Path(sys.argv[1]) / f"rank_{hw.distributed.task_id()}.json").write_text(json.dumps(outcomes))
