"""The parts of a streamed model: its engine, its plans, its optimizers and its steps."""

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.compile import streamed
from headwater.core.errors import StreamError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    """Return a streamed model of two layers with a buffer that counts calls."""
    torch.manual_seed(0)
    model = hw.compile(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), hw.backend("CSX", tier="memory", num_slabs=2)
    )
    model(X)
    yield model
    hw.release(model)


def state_names(model):
    engine = streamed(model).current.present
    return set(engine.store.rule.state_layout(engine.store.spec((0, 0))))


def backward(model):
    (model(X) * X).sum().backward()


def test_the_current_engine_notices_another_structure(model):
    current = streamed(model).current
    assert not current.has_changed
    model.append(nn.Linear(3, 2))
    assert current.has_changed
    assert current.old_names().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    model(X)
    assert not current.has_changed
    assert current.structure.names[id(model[2].weight)] == "2.weight"


def test_a_parameter_that_got_another_shape_has_left_the_engine(model):
    current = streamed(model).current
    model[0].bias.data = torch.zeros(1)
    names = current.old_names()
    assert names.keys() - current.still_streamed(names).keys() == {"0.bias"}


def test_a_released_model_has_its_weights(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    current = streamed(model).current
    hw.release(model)
    assert current.engine is None
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_parameter_that_was_trained_once_stays_in_the_plan(model):
    replanning = streamed(model)._replanning
    engine = streamed(model).engine
    model[0].requires_grad_(False)
    backward(model)
    assert replanning.trained == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert streamed(model).engine is engine


def test_a_dry_run_leaves_random_state_and_frozen_parameters_alone(model):
    model[0].weight.requires_grad_(False)
    state = torch.get_rng_state()
    model(torch.ones(8, 3))  # a larger batch
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[0].weight.requires_grad
    assert not streamed(model)._replanning.is_running


def test_the_store_gets_the_layout_of_the_optimizer_that_steps(model):
    book = streamed(model).optimizers
    weight = model[0].weight
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with_momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    book.update_with(plain)
    assert state_names(model) == set()
    assert book.is_updated_by(weight, plain) and not book.is_updated_by(weight, with_momentum)
    book.update_with(with_momentum)
    assert state_names(model) == {"momentum_buffer"}
    assert book.is_updated_by(weight, with_momentum) and not book.is_updated_by(weight, plain)


def test_another_layout_is_refused_after_a_parameter_has_left(model):
    model[0].bias.data = torch.zeros(1)
    with pytest.raises(StreamError, match="got another shape or dtype between"):
        streamed(model).optimizers.update_with(torch.optim.Adam(model.parameters()))


def test_an_aborted_step_restores_weights_and_buffers(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = streamed(model).steps
    steps.begin_step()
    backward(model)
    optimizer.step()
    steps.abort_step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_ended_step_keeps_its_changes(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    steps = streamed(model).steps
    steps.begin_step()
    backward(model)
    optimizer.step()
    steps.end_step()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.equal(kept["0.weight"], before)
    steps.begin_step()
    steps.abort_step()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
