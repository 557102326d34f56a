"""`optimizer.state` of streamed parameters read, changed and replaced as in plain PyTorch."""

import collections
import copy
import pickle

import pytest
import torch
from any_loop import Place, adamw, check
from test_changed_models import stack, train
from torch import nn

from headwater.core.errors import CheckpointError

plans = pytest.mark.parametrize("plan", ["memory", "slabs", "disk"])


def shown(state):
    """Return a copy of the state of one parameter."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def read(model, optimizer):
    weight, state = model[1][0].weight, optimizer.state
    own = state[weight]
    return [
        weight in state,
        torch.zeros(2) in state,
        len(state),
        bool(state),
        [key is param for key, param in zip(state, model.parameters(), strict=True)],
        shown(own),
        shown(state.get(weight)),
        state.get("nothing", 3),
        [shown(each) for each in state.values()],
        [shown(each) for _, each in state.items()],
        sorted(own),
        len(own),
        "exp_avg" in own,
        own.get("nothing"),
        own["exp_avg"].shape,
        own["exp_avg"].is_contiguous(),
        own["step"].item(),
        torch.zeros_like(own["exp_avg"]),
        shown(dict(own)),
        shown({**own}),
        shown(copy.deepcopy(own)),
        shown(pickle.loads(pickle.dumps(own))),
        isinstance(state, dict),
        isinstance(own, dict),
    ]


def forget(model, optimizer):
    return shown(optimizer.state.pop(model[1][0].weight)), optimizer.state.pop("nothing", 4)


def delete(model, optimizer):
    weight = model[1][0].weight
    own = optimizer.state[weight]
    moment = own["exp_avg"]
    del optimizer.state[weight]
    return own, moment, weight in optimizer.state, len(optimizer.state), optimizer.state.get(weight)


def clear(model, optimizer):
    own = optimizer.state[model[1][0].weight]
    optimizer.state.clear()
    return own, len(optimizer.state), copy.deepcopy(optimizer.state_dict())


def replace_all(model, optimizer):
    kept = optimizer.state
    optimizer.state = collections.defaultdict(dict)
    return len(optimizer.state), optimizer.state_dict(), len(kept), kept[model[0][0].weight]


def empty(model, optimizer):
    optimizer.state[model[1][0].weight] = {}
    return dict(optimizer.state[model[1][0].weight]), len(optimizer.state)


def zero(model, optimizer):
    for param in model[1].parameters():
        own = optimizer.state.get(param)
        if own is not None:
            own["exp_avg"] = torch.zeros_like(param)
            own["exp_avg_sq"].zero_()
            own["step"].fill_(1)
    return copy.deepcopy(optimizer.state_dict())


def zero_rows(model, optimizer):
    """Set rows of the state to zero, as the recycling of dormant neurons does."""
    own = optimizer.state[model[1][0].weight]
    own["exp_avg"][:2] = 0
    own["exp_avg_sq"].data[torch.tensor([True, False] * 3)] = 0.5
    own["exp_avg"].t()[1].mul_(2)
    torch._foreach_mul_([own["exp_avg"], optimizer.state[model[1][0].bias]["exp_avg"]], 0.5)
    return copy.deepcopy(optimizer.state_dict())


def copied_between(model, optimizer):
    state, (first, second) = optimizer.state, (model[0][0].weight, model[1][0].weight)
    state[first] = {name: value.clone() for name, value in state[second].items()}
    state[second]["step"] = torch.tensor(7.0)
    return copy.deepcopy(optimizer.state_dict())


def built_by_name(model, optimizer):
    weight = model[1][0].weight
    del optimizer.state[weight]
    own = optimizer.state[weight]
    own["step"] = torch.tensor(3.0)
    own["exp_avg"] = torch.full_like(weight, 0.01)
    own["exp_avg_sq"] = torch.full_like(weight, 0.02)
    return copy.deepcopy(optimizer.state_dict())


def loaded_without_some(model, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]
    own = optimizer.state[model[0][0].weight]
    before = own["exp_avg"]
    optimizer.load_state_dict(saved)
    optimizer.state[model[0][0].weight]["exp_avg"].zero_()
    return before, own, copy.deepcopy(optimizer.state_dict())


def loaded_from_a_new_one(model, optimizer):
    optimizer.load_state_dict(adamw(model.parameters()).state_dict())
    return len(optimizer.state)


def taken_before(model, optimizer):
    own = optimizer.state[model[1][0].weight]
    moment, row, saved = own["exp_avg"], own["exp_avg"][1], optimizer.state_dict()
    own["exp_avg"] = torch.ones_like(moment)
    train(model, optimizer, 1)
    return moment, row, own["exp_avg"], saved["state"][0]["exp_avg"]


def taken_and_saved_later(model, optimizer):
    """Save a `state_dict` after further steps: all of its entries are then those of the newest step."""
    saved, early = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    late = copy.deepcopy(saved)
    optimizer.load_state_dict(copy.deepcopy(early))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    return early, late, copy.deepcopy(optimizer.state_dict())


def follows(model, optimizer):
    weight = model[1][0].weight
    own = optimizer.state[weight]
    moment, row, count, saved = (
        own["exp_avg"],
        own["exp_avg"][1],
        own["step"],
        copy.deepcopy(optimizer.state_dict()),
    )
    train(model, optimizer, 1)
    now = moment.clone(), row.clone(), count.clone(), own is optimizer.state[weight]
    moment.mul_(0.5)
    count.add_(1)
    return now, own, saved


def swapped(model, optimizer):
    """Set a state by `setdefault` and `update`."""
    weight, bias = model[1][0].weight, model[1][0].bias
    first = optimizer.state.setdefault(weight, {})
    own = {name: value.clone() for name, value in first.items()}
    own["exp_avg"].neg_()
    optimizer.state.update({weight: own})
    optimizer.state.pop(bias)
    return optimizer.state[bias], bias in optimizer.state


CHANGES = [
    read, forget, delete, clear, replace_all, empty, zero, zero_rows, copied_between, built_by_name,
    loaded_without_some, loaded_from_a_new_one, taken_before, taken_and_saved_later, follows,
    swapped,
]  # fmt: skip


@pytest.mark.same_dry_runs("change")
@plans
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_state_is_read_and_changed_between_steps(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        result = change(model, optimizer)
        return losses, result, train(model, optimizer, 2), model, optimizer

    check(script, plan, tmp_path)


@plans
def test_momentum_of_named_parameters_can_be_deleted(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        losses = train(model, optimizer, 2)
        buffer = optimizer.state[model[0][0].weight].pop("momentum_buffer")
        del optimizer.state[model[1][0].weight]["momentum_buffer"]
        return losses, buffer, train(model, optimizer, 2), model, optimizer

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("kept", [True, False])
def test_replaced_parameter_carries_its_state_over(plan, kept, tmp_path):
    """Gaussian splatting appends rows to its parameters, or resets their moments."""

    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        optimizer = adamw([{"params": [param]} for param in model.parameters()])
        losses = train(model, optimizer, 2)
        for group, layer in zip(optimizer.param_groups[::2], (model[0], model[2]), strict=True):
            old = group["params"][0]
            own = optimizer.state.get(old, None)
            new = nn.Parameter(old.detach()[:4].clone() * 2 if kept else torch.ones(4, 6))
            own["exp_avg"] = own["exp_avg"][:4] if kept else torch.zeros_like(new)
            own["exp_avg_sq"] = own["exp_avg_sq"][:4] if kept else torch.zeros_like(new)
            del optimizer.state[old]
            group["params"][0] = new
            optimizer.state[new] = own
            layer.weight = new
            break
        model[0].bias = optimizer.param_groups[1]["params"][0] = nn.Parameter(torch.zeros(4))
        model[2] = nn.Linear(4, 6)
        optimizer.param_groups[2]["params"][0], optimizer.param_groups[3]["params"][0] = model[2].parameters()
        for old in [key for key in optimizer.state if key.shape != (4, 6)]:
            optimizer.state.pop(old)
        state = copy.deepcopy(optimizer.state_dict())
        return losses, state, train(model, optimizer, 2), model, optimizer

    check(script, plan, tmp_path)


@plans
def test_optimizer_state_of_a_released_model_is_a_plain_dictionary(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        optimizer.state.pop(model[1][0].weight)
        model[1][0].weight.data = model[1][0].weight.data[:, :].double()  # this parameter leaves the store
        optimizer.state[model[0][0].weight]["exp_avg"].zero_()
        return losses, [shown(each) for each in optimizer.state.values()], optimizer

    check(script, plan, tmp_path)


def test_incomplete_state_is_refused(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    del optimizer.state[model[1][0].weight]["exp_avg"]
    with pytest.raises(CheckpointError, match=r"(?s)'exp_avg_sq'\], got \['exp_avg_sq'\].*1\.0\.weight"):
        train(model, optimizer, 1)
    place.release()


def test_moment_of_another_shape_is_refused(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    optimizer = adamw(model.parameters())
    train(model, optimizer, 1)
    optimizer.state[model[1][0].weight]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=r"shape \[6, 6\], got \[2, 2\]"):
        train(model, optimizer, 1)
    place.release()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam])
def test_loaded_state_gets_the_dtype_of_its_parameter(kind, dtype, tmp_path):
    """torch converts the loaded state in the same way, except for `step`."""

    def script(place):
        torch.manual_seed(0)
        model = place.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype))
        optimizer = kind(model.parameters(), lr=0.05, foreach=False)
        for _ in range(3):
            model(torch.ones(2, 4, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        states = optimizer.state_dict()["state"].values()
        return model, [shown(state) for state in states]

    check(script, "memory", tmp_path)


class Scaled(nn.Module):
    """A model with a parameter of zero dimensions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


def train_scaled(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@plans
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_state_of_a_parameter_without_dimensions_is_stored_and_loaded(kind, plan, tmp_path):
    def script(place):
        torch.manual_seed(0)
        model = place.compile(Scaled())
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        losses = train_scaled(model, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        losses += train_scaled(model, optimizer, 1)
        optimizer.load_state_dict(saved)
        losses += train_scaled(model, optimizer, 2)
        return losses, model, shown(optimizer.state[model.scale])

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("back", [False, True])
def test_state_made_by_the_constructor_is_kept_for_frozen_parameters(back, plan, tmp_path):
    """Adagrad creates the state of each parameter in its constructor."""

    def script(place):
        torch.manual_seed(0)
        model = place.compile(Scaled())
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        model.layers[0].requires_grad_(False)
        losses = train_scaled(model, optimizer, 2)
        model.layers[0].requires_grad_(back)
        losses += train_scaled(model, optimizer, 2)
        states = optimizer.state_dict()["state"].values()
        return losses, model, [shown(state) for state in states]

    check(script, plan, tmp_path)
