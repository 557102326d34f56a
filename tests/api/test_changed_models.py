"""A model whose structure changes after its first streamed forward equals plain PyTorch."""

import types
import warnings

import pytest
import torch
from any_loop import Place, adamw, check, some_plan
from torch import nn
from torch.nn.utils import parametrize, prune

import headwater as cstorch
from headwater.core.errors import StreamError


def stack(depth=4, width=6):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def inputs(number):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(number))


def step(model, optimizer, number=0):
    optimizer.zero_grad()
    loss = model(inputs(number)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, optimizer, count=3, start=0):
    return [step(model, optimizer, start + number) for number in range(count)]


def evaluate(model):
    with torch.no_grad():
        return model(inputs(99)).sum().item()


def new_layer(model):
    model[1] = nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def new_parameter(model):
    model[1][0].weight = nn.Parameter(torch.randn(6, 6))


def swap(model):
    model[0], model[1] = model[1], model[0]


def append(model):
    model.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


def insert_first(model):
    model.insert(0, nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


def remove(model):
    del model[1]


def wider_head(model):
    model[3] = nn.Linear(6, 9)


def prune_one(model):
    prune.l1_unstructured(model[1][0], "weight", 0.5)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(model):
    parametrize.register_parametrization(model[2][0], "weight", Doubled())


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2

    def right_inverse(self, weight):
        return 2 * weight


def parametrized_with_inverse(model):
    """Register a parametrization with an inverse; torch writes its values by `set_`."""
    parametrize.register_parametrization(model[2][0], "weight", Halved())


def orthogonal(model):
    nn.utils.parametrizations.orthogonal(model[2][0])


def normed_by_hook(model):
    """Apply torch's hook-based weight norm, which makes new parameters from `weight.data`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[2][0])


def normed_by_parametrization(model):
    nn.utils.parametrizations.weight_norm(model[2][0])


def tie(model):
    model[2][0].weight = model[0][0].weight


def own_forward(model):
    old = model[1].forward
    model[1].forward = lambda x: old(x) * 2


def own_method(model):
    layer = model[1][0]
    layer.forward = types.MethodType(
        lambda self, x: nn.functional.linear(x, self.weight * 2, self.bias), layer
    )


def add_module(model):
    model[1].add_module("more", nn.Linear(6, 6))


def another_dictionary(model):
    """Give a container another dictionary of modules, as some libraries do to change their order."""
    model._modules = dict(zip(model._modules, reversed(model._modules.values()), strict=True))


CHANGES = {
    change.__name__: change
    for change in (
        new_layer, new_parameter, swap, append, insert_first, remove, wider_head, prune_one, parametrized,
        tie, own_forward, own_method, add_module, parametrized_with_inverse, orthogonal, normed_by_hook,
        normed_by_parametrization, another_dictionary,
    )
}  # fmt: skip
TAKING_TURNS = ["memory", "gradients on disk", "recompute"]


def each_change(first=0, names=None):
    """Parametrize a test by each change, or by the named ones, with one plan for each."""
    names = names or list(CHANGES)
    pairs = [(name, TAKING_TURNS[(first + index) % 3]) for index, name in enumerate(names)]
    return pytest.mark.parametrize("change,plan", pairs)


@each_change()
def test_model_changed_between_steps_equals_plain(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        first = adamw(model.parameters())
        losses = train(model, first, 2)
        CHANGES[change](model)
        second = adamw(model.parameters(), lr=0.02)
        return losses, train(model, second, 3, start=2), evaluate(model), model, second

    check(script, plan, tmp_path)


@each_change(1, ["new_layer", "wider_head", "tie", "prune_one", "own_forward"])
def test_model_changed_after_an_evaluation_equals_plain(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        before = evaluate(model)
        CHANGES[change](model)
        optimizer = adamw(model.parameters())
        return before, train(model, optimizer), model, optimizer

    check(script, plan, tmp_path)


@each_change(2, ["new_parameter", "swap", "remove", "insert_first", "own_forward"])
def test_optimizer_made_before_a_change_of_the_model_keeps_its_parameters(plan, change, tmp_path):
    """The optimizer still updates a parameter that left the model, and does not update a new one."""

    def script(place):
        model = place.compile(stack())
        params = list(model.parameters())
        optimizer = adamw(params)
        losses = train(model, optimizer, 2)
        CHANGES[change](model)
        losses += train(model, optimizer, 3, start=2)
        return losses, model, params, optimizer

    check(script, plan, tmp_path)


@each_change(0, ["new_parameter", "swap", "remove", "append", "tie"])
def test_model_changed_between_backward_and_the_first_step_equals_plain(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        params = list(model.parameters())
        optimizer = adamw(params)
        model(inputs(0)).square().mean().backward()
        CHANGES[change](model)
        optimizer.step()
        return train(model, optimizer, 3), model, params

    check(script, plan, tmp_path)


@each_change(2, ["new_parameter", "swap", "remove", "append", "tie"])
def test_model_changed_between_backward_and_the_first_step_of_another_optimizer_equals_plain(
    plan, change, tmp_path
):
    """The store needs another layout for the second optimizer, before the model is planned again."""

    def script(place):
        model = place.compile(stack())
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(model, first, 2)
        first.zero_grad()
        second = adamw(model.parameters())
        model(inputs(3)).square().mean().backward()
        CHANGES[change](model)
        second.step()
        return losses, train(model, second, 3), model, second

    check(script, plan, tmp_path)


@each_change(1, ["new_parameter", "swap", "append"])
def test_model_changed_during_gradient_accumulation_equals_plain(plan, change, tmp_path):
    def script(place):
        model = place.compile(stack())
        params = list(model.parameters())
        optimizer = adamw(params)
        train(model, optimizer, 1)
        optimizer.zero_grad()
        model(inputs(5)).square().mean().backward()
        CHANGES[change](model)
        model(inputs(6)).square().mean().backward()
        gradients = [param.grad.clone() for param in params]
        optimizer.add_param_group(
            {"params": [p for p in model.parameters() if id(p) not in set(map(id, params))]}
        )
        optimizer.step()
        return train(model, optimizer, 2), gradients, model, params

    check(script, plan, tmp_path)


@some_plan
def test_alternating_heads_keep_their_values_and_moments(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        heads = [model[3], nn.Linear(6, 2), nn.Linear(6, 3)]
        optimizer = adamw([*model[:3].parameters(), *(p for head in heads for p in head.parameters())])
        losses = []
        for number in range(6):
            model[3] = heads[number % 3]
            losses.append(step(model, optimizer, number))
        return losses, model, [head.state_dict() for head in heads], optimizer

    check(script, plan, tmp_path)


@some_plan
def test_model_changed_within_a_traced_step_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        train(model, optimizer, 1)

        @place.trace
        def traced(number):
            if number == 2:
                new_parameter(model)
                optimizer.add_param_group({"params": [model[1][0].weight]})
            optimizer.zero_grad()
            loss = model(inputs(number)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return [traced(number) for number in range(4)], model

    check(script, plan, tmp_path)


@some_plan
def test_state_dict_assigned_after_a_forward(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        evaluate(model)
        torch.manual_seed(3)
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
        optimizer = adamw(model.parameters())
        return train(model, optimizer), model

    check(script, plan, tmp_path)


@some_plan
def test_state_dict_between_a_change_and_the_next_forward(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        train(model, adamw(model.parameters()), 1)
        insert_first(model)
        return model, train(model, adamw(model.parameters()), 1), model

    check(script, plan, tmp_path)


@pytest.mark.parametrize("of", [lambda weight: weight, lambda weight: weight.data, torch.Tensor.detach])
def test_a_new_parameter_that_shares_memory_with_another_is_refused(of, tmp_path):
    """In plain PyTorch both parameters share memory."""
    model = Place("memory", tmp_path).compile(stack())
    train(model, adamw(model.parameters()), 1)
    model[2][0].weight = nn.Parameter(of(model[0][0].weight))
    with pytest.raises(StreamError, match=r"0\.0\.weight and 2\.0\.weight share memory"):
        model(inputs(0))
    cstorch.release(model)


def test_set_copies_values_and_refuses_other_memory(tmp_path):
    model = Place("memory", tmp_path).compile(stack())
    evaluate(model)
    weight = model[0][0].weight
    with torch.no_grad():
        weight.set_(torch.full((6, 6), 0.5))
        assert torch.equal(weight.clone(), torch.full((6, 6), 0.5))
        weight.set_(weight)
        assert torch.equal(weight.clone(), torch.full((6, 6), 0.5))
        for tensor in (weight, weight.data):
            with pytest.raises(StreamError, match="other memory"):
                tensor.set_(torch.zeros(36), 0, (6, 6), (6, 1))
    with pytest.raises(StreamError, match="changed in place"):
        weight.set_(torch.zeros(6, 6))
    cstorch.release(model)


@some_plan
def test_views_of_a_parameter_work_after_it_left_the_model(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 1)
        part, weight = model[1][0].weight.data[2:4], model[1][0].weight
        new_parameter(model)
        losses += train(model, optimizer, 1)
        part.mul_(2)
        return losses, part, weight

    check(script, plan, tmp_path)


@some_plan
def test_training_continues_after_release(plan, tmp_path):
    """After the release the optimizer holds its state itself."""

    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        place.release()
        return losses, train(model, optimizer, 2, start=2), model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_parameters_of_functional_call_do_not_change_the_model(plan, tmp_path):
    def script(place):
        model, other = place.compile(stack()), stack()
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 1)
        lent = torch.func.functional_call(model, dict(other.named_parameters()), (inputs(7),))
        lent.sum().backward()
        losses += train(model, optimizer, 2)
        return losses, lent, [param.grad for param in other.parameters()], model, optimizer

    check(script, plan, tmp_path)


def test_backward_of_a_forward_before_the_change_and_after_another_forward(tmp_path):
    model = Place("recompute", tmp_path).compile(stack())
    loss = model(inputs(0)).sum()
    swap(model)
    model(inputs(1))
    with pytest.raises(StreamError, match="structure was changed"):
        loss.backward()
    cstorch.release(model)


def kept_gradients(model):
    """Gradients that the loop keeps after a step and sets to zero itself."""
    grads = []

    def zero():
        for grad in grads:
            grad.zero_()

    def keep():
        grads[:] = [param.grad for param in model.parameters()]

    return zero, keep


@some_plan
def test_a_gradient_kept_after_a_step_is_still_that_of_a_model_that_has_changed(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        zero, keep = kept_gradients(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(4):
            zero()
            loss = model(inputs(number)).square().mean()
            loss.backward()
            optimizer.step()
            keep()
            losses.append(loss.item())
            if number == 1:
                model.append(nn.Identity())
                evaluate(model)
        return losses, model

    check(script, plan, tmp_path)


@some_plan
def test_a_sparse_gradient_is_zeroed_after_the_model_has_changed(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6)))
        optimizers = [
            torch.optim.SparseAdam([model[0].weight], lr=0.1),
            torch.optim.SGD(model[1].parameters(), lr=0.1),
        ]
        losses = []
        for number in range(4):
            loss = model(torch.tensor([1, 2, 2])).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            if number == 1:
                model.append(nn.Identity())
                with torch.no_grad():
                    model(torch.tensor([3]))
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)
