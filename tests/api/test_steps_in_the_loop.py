"""Optimizers that no weight store can run: their steps run in the loop and equal plain PyTorch."""

import collections

import pytest
import torch
from any_loop import check, odd_plans, randn, some_plan, train
from torch import nn

import headwater as cstorch
from headwater.api import loop_steps
from headwater.api.loop_steps import LoopStepWarning
from headwater.core.errors import ConfigError

warns = pytest.mark.filterwarnings("ignore::headwater.api.loop_steps.LoopStepWarning")


class UserOptimizer(torch.optim.Optimizer):
    """The frame of all optimizers below, with a momentum."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, **options):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.before(params, loss, **options)
        for group, param in params:
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            average.lerp_(param.grad, 0.5)
            param.add_(average, alpha=-group["lr"] * self.factor(group, param))
        return loss

    def before(self, params, loss):
        pass

    def factor(self, group, param):
        return 1.0


class OneNorm(UserOptimizer):
    """Divides by the norm of all gradients."""

    def before(self, params, loss):
        norm = torch.stack([param.grad.norm() for _, param in params]).norm()
        for _, param in params:
            param.grad.div_(1 + norm)


class Counts(UserOptimizer):
    """Keeps a count on the object, and another in the group."""

    count = 0

    def before(self, params, loss):
        self.count += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

    def factor(self, group, param):
        return 1 / (self.count + group["count"])


class KeepsArgument(UserOptimizer):
    """Keeps an argument on the object."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, lr)
        self.scale = scale

    def factor(self, group, param):
        return self.scale


class ByParameter(UserOptimizer):
    """Takes a factor from each parameter."""

    def factor(self, group, param):
        return getattr(param, "lr_scale", 1.0)


class ByGroup(UserOptimizer):
    """Takes a factor from an entry of the group that is not among the defaults."""

    def factor(self, group, param):
        return group.get("lr_scale", 1.0)


class Noise(UserOptimizer):
    """Adds noise to the gradients."""

    def before(self, params, loss):
        for _, param in params:
            param.grad.add_(torch.randn_like(param.grad), alpha=0.1)


class ClosureLoss(UserOptimizer):
    """Multiplies gradients by the loss of its closure, or by the loss that it gets."""

    def before(self, params, loss, given=None):
        loss = given if loss is None else loss
        for _, param in params if loss is not None else []:
            param.grad.mul_(float(loss))


def net():
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())))
    for number, param in enumerate(model.parameters()):
        param.lr_scale = 0.7**number
    return model


def loss_of(model, number):
    return model(randn(4, 6, seed=number)).square().mean()


def by_groups(model):
    return ByGroup([{"params": layer.parameters(), "lr_scale": 0.5**n} for n, layer in enumerate(model[::2])])


MAKE = {
    "norm": lambda model: OneNorm(model.parameters()),
    "counts": lambda model: Counts(model.parameters()),
    "argument": lambda model: KeepsArgument(model.parameters(), scale=0.3),
    "attribute of parameters": lambda model: ByParameter(model.parameters()),
    "entry of groups": by_groups,
    "noise": lambda model: Noise(model.parameters()),
}


@warns
@odd_plans
@pytest.mark.parametrize("kind", MAKE)
def test_steps_equal_plain(kind, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = MAKE[kind](model)
        losses = []
        for number in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@warns
@odd_plans
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.LBFGS(params, max_iter=3, line_search_fn="strong_wolfe"),
        ClosureLoss,
        OneNorm,
    ],
)
def test_steps_with_a_closure_equal_plain(make, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = make(model.parameters())
        losses = []
        for number in range(2):

            def closure(number=number):
                optimizer.zero_grad()
                loss = loss_of(model, number)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, model

    check(script, plan, tmp_path)


@warns
@odd_plans
@pytest.mark.parametrize("reason", ["attribute", "argument"])
def test_a_step_moves_from_the_store_to_the_loop(reason, plan, tmp_path):
    """The attribute changes, or the step gets another argument, after the store has run two steps."""

    def script(place):
        model = place.compile(net())
        optimizer = (KeepsArgument if reason == "attribute" else ClosureLoss)(model.parameters())
        losses = []
        for number in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            if number == 2 and reason == "attribute":
                optimizer.scale = 0.2
            optimizer.step(**({"given": 0.5} if number >= 2 and reason == "argument" else {}))
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@warns
@odd_plans
def test_clipping_by_the_step_of_this_package_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = OneNorm(model.parameters())
        for number in range(3):
            optimizer.zero_grad()
            (8 * loss_of(model, number)).backward()
            if place.plan is None:
                for param in model.parameters():
                    param.grad.mul_(1 / 8)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            else:
                cstorch.api.optimizers.step(optimizer, max_norm=0.1, loss_scale=8.0)
        return model, optimizer

    check(script, plan, tmp_path)


@warns
@odd_plans
def test_a_step_that_moves_to_the_loop_is_clipped_and_unscaled(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = KeepsArgument(model.parameters())
        scaler = cstorch.amp.GradScaler(loss_scale=1024.0)
        losses = []
        for number in range(4):
            optimizer.zero_grad()
            if number == 2:
                optimizer.scale = 0.2
            loss = loss_of(model, number)
            cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=0.01)
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


def test_a_warning_names_the_reason(tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = OneNorm(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()

    with pytest.warns(LoopStepWarning, match=r"OneNorm steps in your loop, .*depends on other parameters"):
        check(script, "memory", tmp_path)


def test_several_ranks_refuse_a_step_in_the_loop(monkeypatch):
    monkeypatch.setattr(loop_steps, "current", lambda: type("Fabric", (), {"size": 2}))
    with pytest.raises(ConfigError, match="depends on other parameters"):
        loop_steps.runs_in_loop(OneNorm([nn.Parameter(torch.ones(2, 2))]))


class TensorRate(torch.optim.Optimizer):
    """Converts the learning rate to a tensor, and refuses a number, as quantized optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("lr was changed to a number")
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"])


@odd_plans
def test_an_optimizer_that_needs_a_tensor_as_learning_rate(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        optimizer = TensorRate(model.parameters())
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            loss = model(randn(5, 6, seed=number)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)


class SlowWeights(torch.optim.Optimizer):
    """Lookahead (arXiv:1907.08610) that shares groups and state with the optimizer that it calls."""

    def __init__(self, base):
        self.base = base
        super().__init__([torch.zeros(1)], base.defaults)
        self.param_groups, self.state, self.count = base.param_groups, base.state, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for group in self.param_groups if self.count % 2 == 0 else []:
            for param in group["params"]:
                state = self.base.state[param]
                slow = state.setdefault("slow", param.clone())
                slow.lerp_(param, 0.5)
                param.copy_(slow)


@warns
@odd_plans
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_may_keep_tensors_in_the_state_of_another_one(kind, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = SlowWeights(kind(model.parameters(), lr=0.05))
        losses = []
        for number in range(6):
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)


class SlowWeightsOfGroups(SlowWeights):
    """Adds its options to the groups and defaults of the other optimizer, like timm's Lookahead."""

    def __init__(self, base):
        super().__init__(base)
        for options in (base.defaults, *base.param_groups):
            options.setdefault("slow_rate", 0.5)


@warns
@some_plan
def test_an_optimizer_of_torch_with_more_defaults_steps_in_the_loop(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = SlowWeightsOfGroups(torch.optim.AdamW(model.parameters(), lr=0.05))
        return train(model, lambda number: loss_of(model, number), optimizer=optimizer)[:2]

    check(script, plan, tmp_path)


class Numbered(UserOptimizer):
    """Writes the number of each parameter into its state when it is constructed."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param]["number"] = number


@warns
@odd_plans
def test_an_optimizer_may_write_a_state_before_its_first_step(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = Numbered(model.parameters())
        losses = []
        for number in range(4):
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


class WithoutBase(torch.optim.Optimizer):
    """Has groups and a state, but never calls the constructor of torch, like early versions of Lookahead."""

    def __init__(self, params, *, base=None):
        self.base = base
        self.param_groups = base.param_groups if base else [{"params": list(params)}]
        self.state = collections.defaultdict(dict)

    def zero_grad(self):
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self):
        if self.base is not None:
            self.base.step()
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", param.data.clone())
            slow += (param.data - slow) * 0.5
            if self.base is None:
                slow -= param.grad.data
            param.data.copy_(slow)


@pytest.mark.filterwarnings("error::headwater.api.loop_steps.LoopStepWarning")
@odd_plans
@pytest.mark.parametrize("kind", [None, torch.optim.AdamW])
def test_an_optimizer_without_the_constructor_of_torch(kind, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        base = kind(model.parameters(), lr=0.05) if kind else None
        optimizer = WithoutBase(model.parameters(), base=base)
        losses, model, _ = train(model, lambda number: loss_of(model, number), optimizer=optimizer)
        return losses, model, list(optimizer.state.values()), base.state_dict() if base else None

    check(script, plan, tmp_path)
