"""Nodes of autograd's graph that loops take from parameters: hooks on them, and gradients at their edges."""

import pytest
import torch
from any_loop import Net, Place, adamw, batches, check, extreme_plans, loss_of
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    register_multi_grad_hook,
)

from headwater.core.errors import StreamError


@extreme_plans
def test_hooks_on_the_nodes_that_accumulate_gradients_run(plan, tmp_path):
    """Loops of Megatron's kind take these nodes by `expand_as`, torch's own functions by `view_as`."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        seen, losses, nodes = [], [], []
        for number, (inputs, targets) in enumerate(batches(4)):
            if number == 1:  # when the weights are at rest
                for param in model.parameters():
                    node = param.expand_as(param).grad_fn.next_functions[0][0]
                    node.register_hook(lambda *_, param=param: seen.append(param.grad.norm()))
                    nodes.append(node)  # otherwise torch would make another node later
                register_multi_grad_hook([*model.parameters()][:3], lambda grads: seen.append(list(grads)))
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, seen, model, optimizer

    _, seen, *_ = check(script, plan, tmp_path)
    assert len(seen) > 3


@extreme_plans
def test_gradients_at_the_edge_of_a_parameter_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        inputs, targets = batches(1)[0]
        gradients = []
        for _ in range(2):
            loss = loss_of(model(inputs), targets)
            edge = get_gradient_edge(model.head.weight)
            gradients += torch.autograd.grad(loss, edge, retain_graph=True)
            loss.backward(inputs=[edge])
            gradients.append([param.grad for param in model.parameters() if param.grad is not None])
        return gradients

    check(script, plan, tmp_path)


@extreme_plans
def test_a_view_like_the_parameter_itself_follows_it_and_is_trained(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        inputs, targets = batches(1)[0]
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        weight = model.head.weight
        view, same = weight.view_as(weight), weight.expand_as(weight)
        optimizer.zero_grad()
        (loss_of(model(inputs), targets) + (view * same).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            view[0] *= 2
        return view, same, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_forward_whose_saved_tensors_torch_would_copy_is_refused(plan, tmp_path):
    """Otherwise the backward would use weights that were changed after the forward."""
    place = Place(plan, tmp_path)
    model = place.compile(Net())
    inputs, _ = batches(1)[0]
    model(inputs)
    with allow_mutation_on_saved_tensors():
        with pytest.raises(StreamError, match=r"outside of torch\.autograd\.graph\.allow_mutation"):
            model(inputs)
        with torch.no_grad():
            model(inputs)
    place.release()
