"""Gradients that share memory with tensors of the loop, and gradients that the loop differentiates."""

import pytest
import torch
from any_loop import Net, Place, adamw, batches, check, extreme_plans, loss_of
from torch import nn

from headwater.core.errors import StreamError


def script_with(edit, after=lambda model, kept: None, *, zeroing=None):
    """Return a loop that calls `edit(model)` before each step, and `after(model, its result)` afterwards."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(4):
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad() if zeroing is None else zeroing(model)
            loss.backward()
            kept = edit(model)
            optimizer.step()
            after(model, kept)
            losses.append(loss.item())
        return losses, model, optimizer

    return script


def assigned(model):
    """Assign tensors that the loop keeps, and change them afterwards."""
    kept = []
    for param in model.parameters():
        buffer = torch.zeros_like(param)
        gradient, param.grad = param.grad, buffer
        buffer.copy_(gradient)
        kept.append(buffer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for buffer in kept:
        buffer.mul_(0.5)
    return kept


def flat(model):
    """Assign views of one tensor."""
    params = list(model.parameters())
    whole = torch.cat([param.grad.reshape(-1) for param in params])
    parts = whole.split([param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view_as(param)
    return [whole]


def views(model):
    return [param.grad.view(-1) for param in model.parameters()]


def zeroed(model, kept):
    for tensor in kept:
        tensor.zero_()


@extreme_plans
@pytest.mark.parametrize("edit", [assigned, flat, views])
def test_memory_of_gradients_is_used_again_after_the_step(edit, plan, tmp_path):
    """The store applies the update later, with the gradient of the step."""
    check(script_with(edit, zeroed), plan, tmp_path)


def other_memory(model):
    for param in model.parameters():
        param.grad.data = param.grad.data * 0.5


def other_memory_of_a_kept_tensor(model):
    gradients = [param.grad for param in model.parameters()]
    for gradient in gradients:
        gradient.data = gradient.data.sign()


@extreme_plans
@pytest.mark.parametrize("edit", [other_memory, other_memory_of_a_kept_tensor])
def test_a_gradient_may_get_other_memory(edit, plan, tmp_path):
    check(script_with(edit), plan, tmp_path)


@extreme_plans
def test_an_assigned_tensor_is_the_gradient(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        inputs, targets = batches(1)[0]
        loss_of(model(inputs), targets).backward()
        weight = model.head.weight
        own = torch.ones_like(weight)
        weight.grad = own
        loss_of(model(inputs), targets).backward()
        return weight.grad is own, own

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("steps", [1, 3])
def test_a_list_of_gradients_is_kept_over_steps(steps, plan, tmp_path):
    """With `set_to_none=False` the gradients stay the same tensors."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        data = batches(6)
        loss_of(model(data[0][0]), data[0][1]).backward()
        gradients = [param.grad for param in model.parameters()]
        losses = []
        for number, (inputs, targets) in enumerate(data):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            torch._foreach_mul_(gradients, 0.5)
            losses.append(loss.item())
            if number % steps == steps - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        return losses, gradients, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("alias", ["whole", "data"])
def test_other_tensors_with_the_memory_of_gradients_are_kept_over_steps(alias, plan, tmp_path):
    """A loop may keep a flat tensor, and not the gradients, which are views of that tensor."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        data = batches(4)
        loss_of(model(data[0][0]), data[0][1]).backward()
        kept = flat(model) if alias == "whole" else [param.grad.data for param in model.parameters()]
        losses = []
        for inputs, targets in data:
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                loss = loss_of(model(inputs), targets)
                loss.backward()
            torch._foreach_mul_(kept, 0.5)
            losses += [loss.item(), [tensor.clone() for tensor in kept]]
            optimizer.step()
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_gradient_may_be_deleted(plan, tmp_path):
    def delete(model):
        del model.head.weight.grad
        return model.head.weight.grad

    check(script_with(delete), plan, tmp_path)


@extreme_plans
def test_gradients_are_clipped_after_each_traced_micro_batch(plan, tmp_path):
    """Each traced micro-batch is a transaction that begins with gradients of earlier ones."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        norms = []

        @place.trace
        def accumulate(inputs, targets):
            if model.head.weight.grad is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone())
            loss_of(model(inputs), targets).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).clone())

        for number, (inputs, targets) in enumerate(batches(6)):
            accumulate(inputs, targets)
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return norms, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_gradients_that_a_failed_step_has_changed_are_restored(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        inputs, targets = batches(1)[0]
        loss_of(model(inputs), targets).backward()
        before = [param.grad.clone() for param in model.parameters()]

        @place.trace
        def failing():
            torch._foreach_mul_([param.grad for param in model.parameters()], 3.0)
            raise ValueError

        if place.plan is not None:
            with pytest.raises(ValueError):
                failing()
        after = [param.grad for param in model.parameters()]
        return before, after

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", ["memory", "slabs"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_of_gradients_may_be_taken_from_grad(plan, tmp_path):
    """`backward(create_graph=True)`, then a Hutchinson estimate and a penalty of the gradients."""

    def script(place):
        model = place.compile(Net(dropout=0.0, depth=4))
        optimizer = adamw(model.parameters())
        params = list(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            for part, classes in zip(inputs.split(2), targets.split(2), strict=True):
                loss_of(model(part), classes).backward(create_graph=True)
            penalty = sum(param.grad.square().sum() for param in params)
            signs = [torch.ones_like(param) for param in params]
            products = torch.autograd.grad([param.grad for param in params], params, signs, retain_graph=True)
            penalty.backward()
            for param, product in zip(params, products, strict=True):
                param.grad = param.grad.detach() + product
            optimizer.step()
            losses.append(penalty.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_an_error_says_how_to_recompute_activations_with_create_graph(tmp_path):
    place = Place("recompute", tmp_path)
    model = place.compile(Net(dropout=0.0))
    ((inputs, targets),) = batches(1)
    loss = loss_of(model(inputs), targets)
    with pytest.raises(
        StreamError, match=r"create_graph=True, set activations to keep; otherwise set num_slabs to 3"
    ):
        loss.backward(create_graph=True)
    place.release()
