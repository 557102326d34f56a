"""Optimizers on streamed weights: every kind, several on one model, options that change."""

import pytest
import torch
from any_loop import Net, adamw, batches, check, extreme_plans, loss_of, randn, some_plan
from torch import nn

import headwater as cstorch

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "Lamb": {"lr": 0.01},
    "Lion": {"lr": 0.001},
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}


def train(model, optimizers, steps, **options):
    losses = []
    for inputs, targets in steps:
        for optimizer in optimizers:
            optimizer.zero_grad(**options)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.same_dry_runs("name")
@some_plan
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        chosen = getattr(cstorch.optim, name)
        fused = {"fused": True} if name in FUSED else {}
        optimizer = chosen(model.parameters(), **OPTIMIZERS[name], **fused)
        return train(model, [optimizer], batches(4)), model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_muon_for_matrices_and_adamw_for_other_parameters(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        inner = [param for block in model.blocks for param in block.parameters() if param.dim() == 2]
        rest = [param for param in model.parameters() if not any(param is other for other in inner)]
        optimizers = [cstorch.optim.Muon(inner, lr=0.02), adamw(rest)]
        return train(model, optimizers, batches(4)), model, *optimizers

    check(script, plan, tmp_path)


@extreme_plans
def test_two_optimizers_may_alternate(plan, tmp_path):
    """One steps in even steps, the other in odd ones; gradients accumulate until their optimizer steps."""

    def script(place):
        model = place.compile(Net())
        weights = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() <= 1]
        optimizers = [torch.optim.SGD(weights, lr=0.1, fused=True), adamw(rest)]
        losses = []
        for number, (inputs, targets) in enumerate(batches(6)):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()
            losses.append(loss.item())
        return losses, model, *optimizers, [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


@extreme_plans
def test_groups_with_different_options_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        groups = (
            cstorch.optim.configure_param_groups(
                model, [{"params": ["*bias*", "*norm*"], "weight_decay": 0.0}]
            )
            if False
            else [
                {"params": [param for param in model.parameters() if param.dim() > 1], "weight_decay": 0.1},
                {"params": [param for param in model.parameters() if param.dim() <= 1], "lr": 0.03},
            ]
        )
        optimizer = adamw(groups)
        losses = train(model, [optimizer], batches(2))
        optimizer.param_groups[0]["lr"] = 0.001
        return losses, train(model, [optimizer], batches(2)), model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_another_optimizer_may_replace_the_first(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        first = adamw(model.parameters())
        losses = train(model, [first], batches(2))
        second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        losses += train(model, [second], batches(3))
        return losses, model, second

    check(script, plan, tmp_path)


@extreme_plans
def test_a_new_optimizer_of_the_same_kind_starts_without_state(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        losses = train(model, [adamw(model.parameters())], batches(2))
        optimizer = adamw(model.parameters())
        return losses, train(model, [optimizer], batches(2)), model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_foreach_false_equals_plain(plan, tmp_path):
    """If `foreach` or `fused` is given, the engine uses the same kernel as torch."""

    def script(place):
        model = place.compile(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        return train(model, [optimizer], batches(3)), model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_an_optimizer_class_of_the_user_equals_plain(plan, tmp_path):
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params, lr=0.01, decay=0.9):
            super().__init__(params, {"lr": lr, "decay": decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    mean = state.setdefault("mean", torch.zeros_like(param))
                    mean.mul_(group["decay"]).add_(param.grad, alpha=1 - group["decay"])
                    param.sub_(mean.sign(), alpha=group["lr"])

    def script(place):
        model = place.compile(Net())
        optimizer = SignDescent(model.parameters(), lr=0.002)
        return train(model, [optimizer], batches(4)), model, optimizer

    check(script, plan, tmp_path)


class Centralized(torch.optim.SGD):
    """Gradient centralization (arXiv:2004.01461), as a step that changes gradients and calls its base."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() > 1:
                    param.grad.sub_(param.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


@extreme_plans
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_changes_gradients_and_calls_its_base_equals_plain(momentum, plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer = Centralized(model.parameters(), lr=0.1, momentum=momentum)
        for step in range(4):
            model(randn(3, 6, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    check(script, plan, tmp_path)
