"""A script whose model changes on rank 1 only, in several ways: unlike_models_script.py FOLDER."""

import copy
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


def frozen_parameter(model):
    model[2].weight.requires_grad_(False)


def frozen_then_other(model):
    """Freeze a parameter and train another, so that the number of trained parameters stays."""
    model[2].bias.requires_grad_(False)
    model[0].weight.requires_grad_(True)


def no_change(model):
    """Leave the model as it is: the ranks still agree after the errors before."""


CHANGES = (
    layer_of_the_same_shape,
    frozen_parameter,
    frozen_then_other,
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


def learning_rate(optimizer):
    optimizer.param_groups[0]["lr"] = 0.01


def momentum(optimizer):
    optimizer.param_groups[1]["momentum"] = 0.9


def tensor_rate(optimizer):
    optimizer.param_groups[1]["lr"] = torch.tensor(0.3)


def groups_swapped(optimizer):
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


OPTIONS = (learning_rate, momentum, tensor_rate, groups_swapped)


def outcome_of_options(change, backend):
    """Return the message of the second step of an optimizer that changes on rank 1 only, or `trained`."""
    torch.manual_seed(0)
    model = hw.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), backend)
    groups = [{"params": part.parameters()} for part in (model[0], model[2])]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    try:
        for step in range(2):
            optimizer.zero_grad()
            model(hw.distributed.take_part(torch.randn(4, 4))).square().mean().backward()
            if step == 1 and hw.distributed.task_id() == 1:
                change(optimizer)
            optimizer.step()
    except HeadwaterError as error:
        return str(error)
    return "trained"


SCHEDULES = {
    "sgd": ("SGD", {"lr": 0.1}, {
        1: {"lr": 0.05}, 2: {"momentum": 0.9}, 3: {"momentum": 0.5, "dampening": 0.1}, 4: {"momentum": 0.0},
        5: {"weight_decay": 0.1}, 6: {"momentum": 0.9, "nesterov": True, "dampening": 0.0},
    }),
    "adamw": ("AdamW", {"lr": 0.01}, {
        1: {"lr": torch.tensor(0.02)}, 2: {"betas": (0.8, 0.95)}, 3: {"weight_decay": 0.3}, 4: {"eps": 1e-4},
        6: {"betas": (0.5, 0.9), "lr": 0.005},
    }),
}  # fmt: skip
"""By name: an optimizer, its first options, and those of its second group that change before a step."""


def trained_with(schedule, backend):
    """Return all losses, weights and states of a run whose options change; the same on all ranks."""
    name, first, changes = copy.deepcopy(SCHEDULES[schedule])  # StepLR changes a tensor in place
    torch.manual_seed(0)
    model = hw.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), backend)
    groups = [{"params": part.parameters()} for part in (model[0], model[2])]
    optimizer = getattr(torch.optim, name)(groups, **first)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        optimizer.param_groups[1].update(changes.get(step, {}))
        batch = torch.randn(4, 4, generator=generator)
        optimizer.zero_grad()
        model(hw.distributed.take_part(batch)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    state = optimizer.state_dict()["state"]
    return {
        "weights": [param.tolist() for param in model.parameters()],
        "states": [{key: torch.as_tensor(value).tolist() for key, value in state[n].items()} for n in state],
    }


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
    outcomes |= {each.__name__: outcome_of_options(each, chosen) for each in OPTIONS}
    outcomes |= {each: trained_with(each, chosen) for each in SCHEDULES}
    outcomes["sparse"] = outcome_of_sparse(chosen)
    (Path(sys.argv[1]) / f"rank_{hw.distributed.task_id()}.json").write_text(json.dumps(outcomes))
