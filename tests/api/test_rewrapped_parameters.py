"""Parameters that are made from the values of other tensors, and states that are assigned."""

import pytest
import torch
from any_loop import check, some_plan
from torch import nn

import headwater as cstorch
from headwater.core.errors import StreamError


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def train(model, steps=2):
    """Train with a new optimizer; return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), step + 1.0)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def own_values(model, folder):
    model[0].weight = nn.Parameter(model[0].weight.detach())


def of_a_removed_layer(model, folder):
    weight, model[0] = model[0].weight, nn.Linear(4, 4)
    model[0].weight = nn.Parameter(weight.detach())


def taken_before_the_layer_is_removed(model, folder):
    taken, model[0] = model[0].weight.detach(), nn.Linear(4, 4)
    model[0].weight = nn.Parameter(taken)


def taken_and_used_after_a_step_without_it(model, folder):
    taken, model[0] = model[0].weight.detach(), nn.Linear(4, 4)
    train(model, 1)
    model[0].weight = nn.Parameter(taken)


def moved_to_another_layer(model, folder):
    weight = model[0].weight
    del model[0]
    model.append(nn.Linear(4, 4))
    model[2].weight = nn.Parameter(weight.detach())


def frozen(model, folder):
    model[0].weight = nn.Parameter(model[0].weight.detach(), requires_grad=False)


def from_a_file(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    cstorch.save(stack().state_dict(), folder / "weights.mdl")
    model.load_state_dict(cstorch.load(folder / "weights.mdl"), assign=True)


@some_plan
@pytest.mark.parametrize(
    "change",
    [
        own_values,
        of_a_removed_layer,
        taken_before_the_layer_is_removed,
        taken_and_used_after_a_step_without_it,
        moved_to_another_layer,
        frozen,
        from_a_file,
    ],
)
def test_a_parameter_made_from_other_values_equals_plain(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        losses = train(model)
        torch.manual_seed(1)
        change(model, tmp_path / str(place.plan))
        return losses, train(model), model

    check(script, plan, tmp_path)


@some_plan
def test_large_tensors_of_a_file_are_assigned_before_the_first_forward(plan, tmp_path):
    def wide():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8192), nn.Linear(8192, 4))

    cstorch.save(wide().state_dict(), tmp_path / "weights.mdl")

    def script(place):
        model = wide()
        model.load_state_dict(cstorch.load(tmp_path / "weights.mdl"), assign=True)
        if place.plan is None:
            model = wide()
        return train(place.compile(model)), model

    check(script, plan, tmp_path)


def test_a_parameter_that_is_tied_by_its_values_is_refused():
    model = cstorch.compile(stack(), cstorch.backend("CSX"))
    train(model)
    model[2].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(StreamError, match=r"parameters 0\.weight and 2\.weight share memory"):
        train(model)


def test_a_plain_optimizer_of_a_stored_value_raises_with_the_remedy():
    model = cstorch.compile(stack(), cstorch.backend("CSX"))
    train(model)
    weight = nn.Parameter(model[0].weight.detach())
    weight.sum().backward()
    with pytest.raises(
        StreamError, match="a parameter whose values are in a file or in the weight store"
    ) as caught:
        torch.optim.SGD([weight], lr=0.1).step()
    assert "nn.Parameter(tensor.clone())" in caught.value.remedy
    copy = nn.Parameter(model[0].weight.detach().clone())
    copy.sum().backward()
    torch.optim.SGD([copy], lr=0.1).step()
