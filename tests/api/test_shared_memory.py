"""Tensors that share memory with a streamed parameter: changes are visible both ways, as in plain PyTorch."""

import numpy
import pytest
import torch
from any_loop import Place, adamw, check
from test_changed_models import inputs, stack, train

from headwater.core.errors import StreamError

plans = pytest.mark.parametrize("plan", ["memory", "slabs", "disk"])


@plans
@pytest.mark.parametrize("take", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detach"])
def test_averaged_weights_may_be_swapped_in_by_data(take, plan, tmp_path):
    """A common form of weight averaging: `backup = p.data; p.data = shadow; …; p.data = backup`."""

    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        shadow = {name: param.data.clone() * 0.5 for name, param in model.named_parameters()}
        backup = {}
        for name, param in model.named_parameters():
            backup[name] = take(param)
            param.data = shadow[name]
        evaluated = model(inputs(0)).detach().clone()
        between = {name: value.clone() for name, value in backup.items()}
        for name, param in model.named_parameters():
            param.data = backup[name]
        losses += train(model, optimizer, 2)
        return losses, evaluated, between, backup, model  # `backup` shares memory with the parameter again

    check(script, plan, tmp_path)


def data_of_itself(weight):
    weight.data = weight.data
    return weight.detach()


def taken_before(weight):
    whole, detached, row, transposed = weight.data, weight.detach(), weight.data[1], weight.detach().t()
    weight.data = whole * 2
    whole[0, 0] = 7.0  # writes to the former memory, which all of these share
    row.mul_(3)
    return whole, detached, row, transposed


def taken_between(weight):
    first = weight.data
    weight.data = torch.full_like(first, 0.25)
    second = weight.detach()
    weight.data = first
    weight.data.add_(1)
    return first, second, weight.data


def other_dtype(weight):
    old = weight.detach()
    weight.data = weight.data.double()
    copy = weight.data.clone()
    weight.data = weight.data.float()
    old.zero_()
    return old, copy


def with_views(change):
    def act(weight):
        result = change(weight.detach())
        return result if isinstance(result, torch.Tensor) else None

    act.__name__ = change.__name__
    return act


def rows(t):
    t[:2].zero_()


def assigned(t):
    t[:2] = 0.5


def whole(t):
    return t.mul_(0.5)


def by_transpose(t):
    t.t()[1].fill_(2.0)


def flat(t):
    t.view(-1)[3:9].neg_()


def chunk(t):
    t.chunk(2)[0].zero_()


def strided(t):
    t.as_strided((2,), (1,)).zero_()


def foreach(t):
    torch._foreach_mul_([t], 0.5)


def iterated(t):
    for row in t:
        row.add_(1)


def iterated_data(t):
    for row in t.data:
        row.add_(1)


def on_the_cpu(t):
    t.to("cpu").add_(1)


def as_tensor(t):
    torch.as_tensor(t).mul_(3)


def twice(t):
    t.detach().detach()[0].zero_()


def out(t):
    torch.zeros(6, 6, out=t)


CHANGES = [
    data_of_itself, taken_before, taken_between, other_dtype,
    *map(with_views, [rows, assigned, whole, by_transpose, flat, chunk, strided, foreach, iterated,
                      iterated_data, on_the_cpu, as_tensor, twice, out]),
]  # fmt: skip


@plans
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_views_of_a_parameter_share_its_memory(change, plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        view = model[1][0].weight.detach()[2:4]
        result = change(model[1][0].weight)
        seen = view.clone()
        losses += train(model, optimizer, 2)
        return losses, seen, view, result, model

    check(script, plan, tmp_path)


REFUSED = {
    "dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
    "dlpack of data": lambda w: torch.from_dlpack(w.data).zero_(),
    "set_ of detach": lambda w: w.detach().set_(torch.zeros(6, 6)),
    "set_ of data": lambda w: w.data.set_(torch.zeros(6, 6)),
    "data of data": lambda w: setattr(w.data, "data", torch.zeros(6, 6)),
    "data of detach": lambda w: setattr(w.detach(), "data", torch.zeros(6, 6)),
}


@pytest.mark.parametrize("plan", ["memory", "slabs"])
@pytest.mark.parametrize("write", REFUSED)
def test_writes_that_the_store_does_not_see_are_refused(write, plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(stack())
    model(inputs(0))
    with pytest.raises(StreamError, match=r"1\.0\.weight"):
        REFUSED[write](model[1][0].weight)
    place.release()


SHARED = {
    "model": lambda model: model.share_memory(),
    "parameter": lambda model: model[1][0].weight.share_memory_(),
    "data": lambda model: model[1][0].weight.data.share_memory_(),
    "detach": lambda model: model[1][0].weight.detach().share_memory_(),
}


@pytest.mark.parametrize("plan", ["memory", "slabs"])
@pytest.mark.parametrize("share", SHARED)
def test_memory_that_other_processes_would_not_share_is_refused(share, plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(stack())
    model(inputs(0))
    with pytest.raises(StreamError, match="other processes would share a copy"):
        SHARED[share](model)
    copy = model[1][0].weight.detach().clone().share_memory_()
    assert copy.is_shared() and torch.equal(copy, model[1][0].weight)
    place.release()
    model.share_memory()
    assert all(param.is_shared() for param in model.parameters())


WRITES_TO_STORAGE = {
    "share": lambda tensor: tensor.untyped_storage().share_memory_(),
    "fill": lambda tensor: tensor.untyped_storage().fill_(0),
    "copy": lambda tensor: tensor.untyped_storage().copy_(torch.zeros(6, 6).untyped_storage()),
    "resize": lambda tensor: tensor.untyped_storage().resize_(0),
    "item": lambda tensor: tensor.untyped_storage().__setitem__(0, 1),
}


@pytest.mark.parametrize("take", [lambda w: w, lambda w: w.data, lambda w: w.detach(), lambda w: w[0]])
@pytest.mark.parametrize("write", WRITES_TO_STORAGE)
def test_the_storage_of_a_parameter_is_read_only(write, take, tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    model(inputs(0))
    tensor = take(model[1][0].weight)
    with pytest.raises(StreamError, match="this storage is a copy"):
        WRITES_TO_STORAGE[write](tensor)
    assert tensor.untyped_storage().nbytes() == 144 and tensor.untyped_storage().data_ptr()
    place.release()
    model[1][0].weight.untyped_storage().fill_(0)
    assert not model[1][0].weight.any()


def test_arrays_of_a_parameter_are_read_only(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    model(inputs(0))
    weight = model[1][0].weight
    for array in (weight.detach().numpy(), weight.data.numpy(), numpy.asarray(weight.data[0])):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
    place.release()
