"""Hooks that the user registers around an optimizer's step."""

import pytest
import torch
from any_loop import Net, Place, adamw, batches, check, extreme_plans, loss_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headwater.core.errors import StreamError


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def clip(optimizer, args, kwargs):
    nn.utils.clip_grad_norm_(params_of(optimizer), 0.05)


def centralize(optimizer, args, kwargs):
    for param in params_of(optimizer):
        if param.grad is not None and param.grad.dim() > 1:
            param.grad.sub_(param.grad.mean(1, keepdim=True))


def lower_the_rate(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@torch.no_grad()
def decay(optimizer, args, kwargs):
    for param in params_of(optimizer):
        param.mul_(0.9)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(place, register, make=adamw):
    model = place.compile(Net())
    optimizer = make(model.parameters())
    handle = register(optimizer)
    losses = []
    for inputs, targets in batches(4):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handle.remove()
    return losses, model, optimizer


@extreme_plans
@pytest.mark.parametrize("hook", [clip, centralize, lower_the_rate, decay])
def test_hooks_before_a_step_equal_plain(hook, plan, tmp_path):
    def script(place):
        return train(place, lambda optimizer: optimizer.register_step_pre_hook(hook))

    check(script, plan, tmp_path)


@pytest.mark.parametrize("make", [adamw, sgd])  # torch's optimizer updates the pieces of SGD
@pytest.mark.parametrize("hook", [clip, lower_the_rate])
def test_hooks_before_the_steps_of_all_optimizers_equal_plain(hook, make, tmp_path):
    def script(place):
        return train(place, lambda _: register_optimizer_step_pre_hook(hook), make)

    check(script, "memory", tmp_path)


@extreme_plans
def test_a_hook_after_a_step_sees_and_changes_the_new_weights(plan, tmp_path):
    def script(place):
        seen = []

        def project(optimizer, args, kwargs):
            seen.append([param.detach().clone() for param in params_of(optimizer)])
            for param in params_of(optimizer):
                param.data.clamp_(-0.1, 0.1)

        return train(place, lambda optimizer: optimizer.register_step_post_hook(project)), seen

    check(script, plan, tmp_path)


def test_a_hook_after_a_step_that_reads_gradients_raises(tmp_path):
    """The gradients are consumed. They must not seem to be missing."""

    def read(optimizer, args, kwargs):
        return [param.grad.norm() for param in params_of(optimizer) if param.grad is not None] and None

    with pytest.raises(StreamError, match=r"read it before optimizer\.step"):
        train(Place("memory", tmp_path), lambda optimizer: optimizer.register_step_post_hook(read))
