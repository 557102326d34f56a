"""States of models and optimizers are read, written, saved and loaded at any time, also during training."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from any_loop import (
    Net,
    Place,
    adamw,
    batches,
    check,
    every_plan,
    extreme_plans,
    loss_of,
    some_plan,
)
from torch import nn

import headwater as cstorch


def train(model, optimizer, steps):
    losses = []
    for inputs, targets in steps:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every_plan
def test_states_are_saved_and_loaded_during_training(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        steps = batches(6)
        losses = train(model, optimizer, steps[:2])
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        losses += train(model, optimizer, steps[2:4])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses += train(model, optimizer, steps[4:])
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("when", ["before any forward", "after a forward"])
@pytest.mark.parametrize("way", ["headwater", "torch"])
def test_a_resumed_run_equals_an_uninterrupted_one(plan, when, way, tmp_path):
    save = cstorch.save if way == "headwater" else torch.save
    load = cstorch.load if way == "headwater" else torch.load
    file = tmp_path / "state"

    def script(place):
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = []

        def go_on(steps):
            for batch in steps:
                losses.extend(train(model, optimizer, [batch]))
                scheduler.step()

        go_on(batches(6)[:3])
        if place.plan is None:
            go_on(batches(6)[3:])
            return losses, model, optimizer
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        save({name: part.state_dict() for name, part in parts.items()}, file)
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if when == "after a forward":
            train(model, optimizer, batches(1, seed=5))
        state = load(file)
        for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
            part.load_state_dict(state[name])
        go_on(batches(6)[3:])
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.parametrize("saved_by", ["plain", "streamed"])
def test_states_move_between_plain_and_streamed_models(plan, saved_by, tmp_path):
    def make(place):
        model = place.compile(Net(dropout=0.0))
        return model, adamw(model.parameters())

    def script(place):
        first, second = (
            (Place(None, tmp_path), place) if saved_by == "plain" else (place, Place(None, tmp_path))
        )
        model, optimizer = make(first)
        losses = train(model, optimizer, batches(3))
        other, other_optimizer = make(second)
        other.load_state_dict(model.state_dict())
        other_optimizer.load_state_dict(optimizer.state_dict())
        losses += train(other, other_optimizer, batches(3, seed=2))
        return losses, other, other_optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_the_optimizer_state_is_loaded_before_the_first_forward(plan, tmp_path):
    def script(place):
        trained = Net(dropout=0.0)
        its_optimizer = adamw(trained.parameters())
        train(trained, its_optimizer, batches(2))
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        model.load_state_dict(trained.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
        return train(model, optimizer, batches(3)), model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_step_is_visible_to_every_following_read(plan, tmp_path):
    """The new values are visible right after the step, although the store applies the update later."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        shown = []
        for batch in batches(3):
            train(model, optimizer, [batch])
            shown.append(model.head.weight.clone())
            shown.append(model.norm.bias.sum().item())
            shown.append({name: param.detach().clone() for name, param in model.named_parameters()})
            shown.append(optimizer.state_dict()["state"][0]["step"].clone())
        return shown

    check(script, plan, tmp_path)


WRITES = {
    "copy_": lambda param: param.copy_(torch.full_like(param, 0.1)),
    "mul_": lambda param: param.mul_(0.9),
    "data": lambda param: setattr(param, "data", torch.full_like(param, 0.2)),
    "data clamped": lambda param: param.data.clamp_(-0.01, 0.01),
    "a row": lambda param: param[0].fill_(0.5),
    "a row of data": lambda param: param.data[0].zero_(),
    "an element": lambda param: param.view(-1)[3:4].add_(1.0),
    "an item": lambda param: param.__setitem__(0, 0.25),
    "rows": lambda param: [row.mul_(0.5) for row in param],
    "chunks": lambda param: param.data.chunk(2)[1].neg_(),
    "transposed": lambda param: param.t().add_(0.125),
    "init": lambda param: nn.init.orthogonal_(param),
    "init of data": lambda param: nn.init.normal_(param.data),
    "foreach": lambda param: torch._foreach_mul_([param], 1.5),
    "lerp_": lambda param: param.lerp_(torch.ones_like(param), 0.25),
}


@pytest.mark.same_dry_runs("write")
@extreme_plans
@pytest.mark.parametrize("write", WRITES)
def test_values_written_to_a_parameter_are_kept(plan, write, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for batch in batches(3):
            losses += train(model, optimizer, [batch])
            with torch.no_grad():
                for param in (model.head.weight, model.blocks[1][0].weight):
                    WRITES[write](param)
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_parameters_to_vector_and_back_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(2))
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        return losses, vector, train(model, optimizer, batches(2)), model

    check(script, plan, tmp_path)


@extreme_plans
def test_moving_averages_kept_by_the_loop_equal_plain(plan, tmp_path):
    """The loop keeps an exponential moving average and swaps it in for each evaluation."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        average = [param.detach().clone() for param in model.parameters()]
        losses, scores = [], []
        for batch in batches(4):
            losses += train(model, optimizer, [batch])
            with torch.no_grad():
                for mean, param in zip(average, model.parameters(), strict=True):
                    mean.mul_(0.9).add_(param.data, alpha=0.1)
                own = [param.clone() for param in model.parameters()]
                for param, mean in zip(model.parameters(), average, strict=True):
                    param.copy_(mean)
                scores.append(model(batch[0]).sum().item())
                for param, value in zip(model.parameters(), own, strict=True):
                    param.copy_(value)
        return losses, scores, average, model, optimizer

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.parametrize("first", ["average", "compile"])
def test_averaged_model_of_torch_equals_plain(plan, first, tmp_path):
    """`AveragedModel` copies the model."""

    def script(place):
        model = Net()
        average = torch.optim.swa_utils.AveragedModel(model) if first == "average" else None
        model = place.compile(model)
        average = average or torch.optim.swa_utils.AveragedModel(model)
        optimizer = adamw(model.parameters(), lr=0.02)
        scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
        losses = []
        for batch in batches(4):
            losses += train(model, optimizer, [batch])
            average.update_parameters(model)
            scheduler.step()
        return losses, average, model

    check(script, plan, tmp_path)


@every_plan
def test_a_copy_of_a_streamed_model_equals_a_copy_of_the_plain_model(plan, tmp_path):
    """The copy and the model train independently. The copy may be compiled, too."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(2))
        model.blocks[0][0].weight.requires_grad_(False)
        copied, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
        frozen = [name for name, param in copied.named_parameters() if not param.requires_grad]
        losses += train(copied, adamw(copied.parameters()), batches(2))
        losses += train(model, optimizer, batches(1))
        place.compile(copied)
        losses += train(copied, adamw(copied.parameters()), batches(2))
        twice = copy.deepcopy(copied)
        place.release()
        return losses, frozen, model, copied, part, twice

    check(script, plan, tmp_path)


def test_a_copy_of_a_streamed_model_is_a_plain_model(tmp_path):
    place = Place("recompute", tmp_path)
    model = place.compile(Net())
    assert_plain(copy.deepcopy(model))
    train(model, adamw(model.parameters()), batches(1))
    assert_plain(copy.deepcopy(model))
    place.release()


def test_a_copy_after_the_step_of_another_optimizer_is_a_plain_model(tmp_path):
    """The store gets another layout for the second optimizer, and its blocks other forwards."""
    place = Place("recompute", tmp_path)
    model = place.compile(Net())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(2))
    for _ in range(2):
        train(model, adamw(model.parameters()), batches(1))
        copied = copy.deepcopy(model).eval()
        assert_plain(copied)
        ((tokens, _),) = batches(1)
        assert torch.equal(copied(tokens), model.eval()(tokens))
        model.train()
    place.release()


@extreme_plans
def test_a_copy_of_a_copy_is_independent_and_is_freed_at_once(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    x = torch.randn(3, 6)
    model(x).sum().backward()
    copied = copy.deepcopy(model)
    shallow = copy.copy(copied)
    shallow._modules = {**copied._modules, "1": nn.ReLU()}
    assert torch.equal(shallow(x), copied[2](copied[0](x).relu()))
    # A shallow copy of the streamed module has its attributes, too.
    streamed = copy.copy(model)
    streamed._modules = {**model._modules, "1": nn.ReLU()}
    assert torch.equal(copy.deepcopy(streamed)(x), shallow(x))
    gc.disable()
    try:
        kept = weakref.ref(copied)
        del copied, shallow
        assert kept() is None
    finally:
        gc.enable()
    place.release()
    assert "__deepcopy__" not in vars(model)


@extreme_plans
def test_a_copy_of_a_layer_in_its_forward_under_autocast_has_fp32_weights(plan, tmp_path):
    class Copied(nn.Linear):
        def forward(self, x):
            copies.append(copy.deepcopy(self))
            return super().forward(x)

    def script(place):
        copies.clear()
        model = place.compile(nn.Sequential(Copied(6, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer = adamw(model.parameters())
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(3, 6)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return copies[-1], model

    copies = []
    check(script, plan, tmp_path)


def assert_plain(module):
    """Assert that a module has only parameters of torch, and can be pickled without Headwater."""
    assert not cstorch.api.compile.is_compiled(module)
    assert {type(param) for param in module.parameters()} == {nn.Parameter}
    pickled = pickle.dumps(module)
    assert b"headwater." not in pickled  # the name of a module of Headwater
    loaded, tokens = pickle.loads(pickled).eval(), batches(1)[0][0]
    assert torch.equal(loaded(tokens), module.eval()(tokens))


def test_model_and_optimizer_that_are_copied_together_train_as_in_plain_pytorch(tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(2))
        copied, own = copy.deepcopy((model, optimizer))
        losses += train(copied, own, batches(2)) + train(model, optimizer, batches(1))
        return losses, copied, own, model, optimizer

    check(script, "memory", tmp_path)


@some_plan
def test_a_released_model_is_a_plain_model(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(2))
        optimizer.zero_grad()
        loss_of(model(batches(1)[0][0]), batches(1)[0][1]).backward()
        state = copy.deepcopy(optimizer.state_dict())
        place.release()
        shown = [param.grad for param in model.parameters()]
        optimizer = adamw(model.parameters())
        optimizer.load_state_dict(state)
        optimizer.step()
        return losses, shown, train(model, optimizer, batches(2)), copy.deepcopy(model), optimizer

    check(script, plan, tmp_path)
