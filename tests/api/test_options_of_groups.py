"""Optimizer state that depends on the options of a parameter group, and options that are tensors."""

import io
from functools import partial

import numpy
import pytest
import torch
from any_loop import Place, assert_equal, check
from torch import nn

import headwater as cstorch
from headwater.core.errors import CheckpointError, ConfigError

plans = pytest.mark.parametrize("plan", ["memory", "slabs", "disk"])
LARGE = (2048, 1024)  # two pieces
SMALL = (32, 16)


def stack(shape):
    rows, columns = shape
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, columns), nn.Linear(columns, rows, bias=False), nn.Linear(rows, 3))


def inputs(number):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number)) * (3 - number)


def one_step(model, optimizer, number):
    optimizer.zero_grad()
    loss = model(inputs(number)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def groups(model, **options):
    """Return two groups: the middle weight with these options, and the other parameters."""
    return [
        {"params": [*model[0].parameters(), *model[2].parameters()]},
        {"params": model[1].parameters(), **options},
    ]


def copied(state):
    """Return a deep copy of the state, through a file: torch shares the step counts that it loads."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


KEEPS = {
    "momentum in a group": lambda m: torch.optim.SGD(groups(m, momentum=0.9, dampening=0.1), lr=0.01),
    "no momentum in a group": lambda m: torch.optim.SGD(groups(m, momentum=0), lr=0.01, momentum=0.9),
    "amsgrad in a group": lambda m: torch.optim.Adam(groups(m, amsgrad=True), lr=0.01),
    "no amsgrad in a group": lambda m: torch.optim.Adam(groups(m, amsgrad=False), lr=0.01, amsgrad=True),
    "centered with momentum in a group": lambda m: torch.optim.RMSprop(
        groups(m, centered=True, momentum=0.5), lr=0.001
    ),
    "plain RMSprop in a group": lambda m: torch.optim.RMSprop(
        groups(m, centered=False, momentum=0), lr=0.001, centered=True, momentum=0.5
    ),
}


@plans
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, SMALL) for name in KEEPS), ("momentum in a group", LARGE), ("no amsgrad in a group", LARGE)],
)
def test_state_follows_the_options_of_the_group(plan, name, shape, tmp_path):
    def script(place):
        model = place.compile(stack(shape))
        optimizer = KEEPS[name](model)
        return [one_step(model, optimizer, number) for number in range(3)], model, optimizer

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("first", [0, 0.9])
def test_momentum_may_change_during_a_run(plan, shape, first, tmp_path):
    def script(place):
        model = place.compile(stack(shape))
        optimizer = torch.optim.SGD(groups(model, momentum=first, dampening=0.1), lr=0.01)
        losses = []
        for number, momentum in enumerate([first, 0.9 - first, 0.9 - first, first]):
            optimizer.param_groups[1]["momentum"] = momentum
            losses.append(one_step(model, optimizer, number))
        return losses, model, optimizer

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("make", KEEPS.values(), ids=KEEPS)
def test_state_of_a_group_survives_saving_and_loading(plan, make, tmp_path):
    def script(place):
        model = place.compile(stack(SMALL))
        first = make(model)
        one_step(model, first, 0)
        saved = first.state_dict()
        again = make(model)
        again.load_state_dict(saved)
        losses = [one_step(model, again, 1)]
        again.load_state_dict(again.state_dict())
        return [*losses, one_step(model, again, 2)], model, again

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("options", [{"amsgrad": False}, {"amsgrad": True}])
def test_state_of_a_group_moves_to_plain_pytorch_and_back(plan, options, tmp_path):
    def adam(model):
        return torch.optim.Adam(groups(model, **options), lr=0.01, amsgrad=not options["amsgrad"])

    def script(place):
        models = [place.compile(stack(SMALL)), stack(SMALL), place.compile(stack(SMALL))]
        optimizers = [adam(model) for model in models]
        losses = []
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if number:
                model.load_state_dict(models[number - 1].state_dict())
                optimizer.load_state_dict(copied(optimizers[number - 1].state_dict()))
            losses.append(one_step(model, optimizer, number))
        return losses, models, optimizers

    check(script, plan, tmp_path)


@plans
def test_state_of_a_disabled_option_is_loaded(plan, tmp_path):
    def script(place):
        model = place.compile(stack(SMALL))
        first = torch.optim.SGD(groups(model, momentum=0.9), lr=0.01)
        one_step(model, first, 0)
        first.param_groups[1]["momentum"] = 0
        losses = [one_step(model, first, 1)]
        again = torch.optim.SGD(groups(model), lr=0.01)
        again.load_state_dict(first.state_dict())
        losses.append(one_step(model, again, 2))
        again.param_groups[1]["momentum"] = 0.9
        return [*losses, one_step(model, again, 3)], model, again

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("late", [False, True])
def test_running_optimizer_loads_a_state_with_other_tensors(plan, late, tmp_path):
    def script(place):
        plain, model = stack(SMALL), place.compile(stack(SMALL))
        given = torch.optim.SGD(groups(plain, momentum=0.9), lr=0.01)
        one_step(plain, given, 0)
        if late:
            given.param_groups[1]["momentum"] = 0
        optimizer = torch.optim.SGD(groups(model), lr=0.01)
        losses = [one_step(model, optimizer, 0)]
        optimizer.load_state_dict(copied(given.state_dict()))
        losses.append(one_step(model, optimizer, 1))
        optimizer.param_groups[1]["momentum"] = 0.9
        return [*losses, one_step(model, optimizer, 2)], model, optimizer

    check(script, plan, tmp_path)


@plans
def test_running_optimizer_loads_a_state_with_fewer_tensors(plan, tmp_path):
    def script(place):
        plain, model = stack(SMALL), place.compile(stack(SMALL))
        given = torch.optim.Adam(plain.parameters(), lr=0.01)
        one_step(plain, given, 0)
        optimizer = torch.optim.Adam(groups(model, amsgrad=True), lr=0.01)
        losses = [one_step(model, optimizer, 0)]
        saved = copied(given.state_dict())
        own = optimizer.state_dict()["param_groups"]
        saved["param_groups"] = [{**saved["param_groups"][0], "params": group["params"]} for group in own]
        saved["state"] = {number: saved["state"][old] for number, old in enumerate([0, 1, 3, 4, 2])}
        optimizer.load_state_dict(saved)
        return [*losses, one_step(model, optimizer, 1)], model, optimizer

    check(script, plan, tmp_path)


def test_a_refused_load_leaves_the_state_unchanged(tmp_path):
    model = Place("slabs", tmp_path).compile(stack(SMALL))
    optimizer = torch.optim.Adam(groups(model, amsgrad=True), lr=0.01)
    one_step(model, optimizer, 0)
    saved = copied(optimizer.state_dict())
    broken = copied(saved)
    del broken["state"][0]["exp_avg"]
    with pytest.raises(CheckpointError, match="exp_avg"):
        optimizer.load_state_dict(broken)
    assert_equal(copied(optimizer.state_dict())["state"][4], saved["state"][4])


@plans
def test_an_option_may_change_before_the_first_gradient(plan, tmp_path):
    def script(place):
        model = place.compile(stack(SMALL))
        optimizer = torch.optim.Adam(groups(model), lr=0.01)
        model[1].weight.requires_grad_(False)
        losses = [one_step(model, optimizer, 0)]
        model[1].weight.requires_grad_(True)
        optimizer.param_groups[1]["amsgrad"] = True
        return [*losses, one_step(model, optimizer, 1), one_step(model, optimizer, 2)], model, optimizer

    check(script, plan, tmp_path)


@pytest.mark.parametrize(
    ("kind", "option", "missing"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_an_option_change_that_plain_pytorch_rejects_is_refused(kind, option, missing, tmp_path):
    model = Place("slabs", tmp_path).compile(stack(SMALL))
    optimizer = kind(groups(model), lr=0.01)
    one_step(model, optimizer, 0)
    optimizer.param_groups[1].update(option)
    before = model[1].weight.detach().clone()
    with pytest.raises(ConfigError, match=missing):
        one_step(model, optimizer, 1)
    assert torch.equal(model[1].weight, before)


class LateSum(torch.optim.Optimizer):
    """An optimizer that keeps the sum of gradients from the third step on."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 2:
                    state["sum"] = state.get("sum", 0) + param.grad
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore::headwater.api.loop_steps.LoopStepWarning")
def test_an_optimizer_that_creates_state_late_equals_plain(tmp_path):
    """Its steps run in the loop."""

    def script(place):
        model = place.compile(stack(SMALL))
        optimizer = LateSum(model.parameters())
        for number in range(4):
            one_step(model, optimizer, number)
        return model, optimizer

    check(script, "slabs", tmp_path)


RATES = {
    "Adam": partial(torch.optim.Adam),
    "fused Adam": partial(torch.optim.Adam, fused=True),
    "AdamW": partial(torch.optim.AdamW),
    "Adam with tensor betas": partial(torch.optim.Adam, betas=(torch.tensor(0.9), torch.tensor(0.999))),
    **{
        name: getattr(torch.optim, name)
        for name in ["NAdam", "RAdam", "Adamax", "ASGD", "Adafactor", "SGD", "RMSprop", "Adagrad", "Adadelta"]
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", RATES.values(), ids=RATES)
def test_a_tensor_learning_rate_equals_plain(make, dtype, tmp_path):
    def script(place):
        model = place.compile(stack(SMALL))
        optimizer = make(model.parameters(), lr=torch.tensor(0.01, dtype=dtype))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        losses = []
        for number in range(3):
            losses.append(one_step(model, optimizer, number))
            schedule.step()
        return losses, model, optimizer.state_dict()["state"]

    check(script, "slabs", tmp_path)


def test_validate_only_accepts_a_tensor_learning_rate():
    model = stack(SMALL)
    optimizers = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.01, torch.tensor(0.01))]
    reports = [cstorch.validate_only(model, inputs(0), optimizer=each) for each in optimizers]
    assert reports[0].state_bytes == reports[1].state_bytes > 0


class Settings:
    """An object with settings, which the loop changes."""

    def __init__(self):
        self.scales = {"scale": 1.0}


SHARED = Settings()


class Scaled(torch.optim.Optimizer):
    """Multiplies the learning rate by the factors in its options and attributes."""

    def __init__(self, params, lr=0.05, kind="dictionary"):
        options = {
            "dictionary": {"scale": 1.0},
            "list in a dictionary": {"scales": [1.0]},
            "array": numpy.ones(2),
            "object": Settings(),
            "attribute": None,
        }
        super().__init__(params, {"lr": lr, "kind": kind, "factor": options[kind]})
        self.settings = SHARED

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    factor = factor_in(group["kind"], group["factor"], self.settings)
                    param.sub_(param.grad, alpha=group["lr"] * factor)


def factor_in(kind, option, settings):
    if kind == "attribute":
        return settings.scales["scale"]
    if kind == "object":
        return option.scales["scale"]
    if kind == "array":
        return float(option[0])
    return option["scale"] if kind == "dictionary" else option["scales"][0]


def halve(kind, option):
    if kind in ("attribute", "object"):
        (SHARED if kind == "attribute" else option).scales["scale"] *= 0.5
    elif kind == "array":
        option *= 0.5
    elif kind == "dictionary":
        option["scale"] *= 0.5
    else:
        option["scales"][0] *= 0.5


@pytest.mark.filterwarnings("ignore::headwater.api.loop_steps.LoopStepWarning")
@pytest.mark.parametrize("plan", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["dictionary", "list in a dictionary", "array", "object", "attribute"])
def test_containers_and_objects_have_their_values_of_the_step(kind, plan, tmp_path):
    def script(place):
        SHARED.scales["scale"] = 1.0
        model = place.compile(stack(SMALL))
        optimizer = Scaled(model.parameters(), kind=kind)
        losses = []
        for number in range(3):
            losses.append(one_step(model, optimizer, number))
            halve(kind, optimizer.param_groups[0]["factor"])
        return losses, model

    check(script, plan, tmp_path)


def test_an_optimizer_with_an_object_as_option_runs_in_the_store(recwarn):
    model = cstorch.compile(stack(SMALL), cstorch.backend("CSX"))
    one_step(model, Scaled(model.parameters(), kind="object"), 0)
    assert not [each for each in recwarn if "steps in your loop" in str(each.message)]
