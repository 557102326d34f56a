"""Views of weights that a loop takes between forwards while gradients are recorded."""

import pytest
import torch
from any_loop import Place, adamw, check
from test_changed_models import inputs, stack
from torch import nn

from headwater.core.errors import StreamError

plans = pytest.mark.parametrize("plan", ["memory", "slabs", "disk"])

VIEWS = {
    "row": lambda weight: weight[0],
    "transposed": lambda weight: weight.t(),
    "flat": lambda weight: weight.view(-1),
    "view of a view": lambda weight: weight.t()[1:3],
    "the same": lambda weight: weight.to("cpu"),
}


@plans
@pytest.mark.parametrize("view", VIEWS)
def test_a_kept_view_follows_the_steps_and_is_trained(view, plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        model(inputs(0))
        optimizer = adamw(model.parameters())
        kept = VIEWS[view](model[1][0].weight)
        losses = []
        for number in range(4):
            optimizer.zero_grad()
            loss = model(inputs(number)).square().mean() + kept.square().sum()
            loss.backward()
            optimizer.step()
            losses += [loss.item(), kept]
        return losses, model, optimizer

    check(script, plan, tmp_path)


@plans
def test_an_element_is_formatted_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        shown = []
        for number in range(2):
            optimizer.zero_grad()
            model(inputs(number)).square().mean().backward()
            optimizer.step()
            bias = model[1][0].bias
            shown += [f"{bias[0]:.3f}", f"{bias[1]}", f"{bias.detach()[2]:.2e}", f"{bias.sum():.4f}"]
        return shown

    check(script, plan, tmp_path)


def written(weight):
    with torch.no_grad():
        weight[0].mul_(0.5)
        weight.copy_(weight.t().contiguous())


def by_detach(weight):
    row = weight[:2]
    row.detach().zero_()
    row.data[0, 0] = 5.0
    torch.add(row.detach(), weight.detach()[:2], out=row.detach()[:, :])


def initialized(weight):
    nn.init.uniform_(weight.t())


def assigned(weight):
    weight.data = weight.t() * 2


def filled(weight):
    with torch.no_grad():
        for row in weight.t():
            row.fill_(0.5)


@plans
@pytest.mark.parametrize("change", [written, by_detach, initialized, assigned, filled])
def test_a_write_to_a_view_changes_the_weight(change, plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        model(inputs(0))
        weight = model[1][0].weight
        kept, flat = weight[1], weight.view(-1)
        change(weight)
        return model, kept, flat * 2, model(inputs(1))

    check(script, plan, tmp_path)


@plans
def test_the_graph_of_a_view_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        model(inputs(0))
        weight = model[1][0].weight
        view = weight[0]
        view.retain_grad()
        loss = view.square().sum()
        (gradient,) = torch.autograd.grad(loss, view, retain_graph=True)
        loss.backward()
        return gradient, view.grad, weight.grad, view.requires_grad, view.is_leaf

    check(script, plan, tmp_path)


@plans
def test_a_backward_with_the_old_values_of_a_view_raises(plan, tmp_path):
    for where in (None, plan):
        place = Place(where, tmp_path)
        model = place.compile(stack())
        model(inputs(0))
        view = model[1][0].weight[0]
        squared = view * view
        with torch.no_grad():
            model[1][0].weight.add_(1)
        assert view.sum() != squared.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward()
        place.release()


@plans
def test_a_recorded_change_of_a_view_is_refused(plan, tmp_path):
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        stack()[1][0].weight[0].add_(1)
    place = Place(plan, tmp_path)
    model = place.compile(stack())
    model(inputs(0))
    before, view = model[1][0].weight.detach().clone(), model[1][0].weight[0]
    with pytest.raises(StreamError, match="changed in place"):
        view.add_(1)
    assert torch.equal(view, before[0]) and torch.equal(model[1][0].weight, before)
    place.release()


@plans
def test_views_outlive_a_new_plan_and_the_release(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        model(inputs(0))
        view = model[1][0].weight[0]
        model[2] = nn.Linear(6, 6)
        with torch.no_grad():
            model(inputs(1))
            model[1][0].weight.add_(1)
        first = view.clone()
        place.release()
        with torch.no_grad():
            model[1][0].weight.mul_(2)
        return first, view, model

    check(script, plan, tmp_path)


@plans
def test_a_view_is_an_input_of_the_model_and_of_another_module(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        model(inputs(0))
        weight = model[1][0].weight
        optimizer = adamw(model.parameters())
        prompt, projection = weight[:4], weight.t()
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(prompt) @ projection).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)
