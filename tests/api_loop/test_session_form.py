"""The older API: sessions and the experimental module."""

import pytest
import torch
from torch import nn

import headwater
import headwater.experimental
import headwater.framework.torch as cbtorch
from headwater.core.errors import ConfigError, StreamError
from headwater.framework.torch import modes
from headwater.utils.data import DataExecutor


def data_fn():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.ones(4, 1)) for _ in range(5)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def train(model, optimizer, loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def plain_evaluation(model):
    model.eval()
    return torch.cat([model(inputs) for inputs, _ in data_fn()])


def test_a_script_with_sessions_equals_plain_torch(caplog):
    cbtorch.initialize("CPU", cs_ip="1.2.3.4")
    assert "cs_ip='1.2.3.4' is ignored" in caplog.text
    model = cbtorch.module(make_model())
    loader = cbtorch.dataloader(data_fn)
    optimizer = cbtorch.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    with cbtorch.Session(loader, modes.TRAIN):
        train(model, optimizer, loader)
    with cbtorch.Session(loader, modes.EVAL) as batches:
        outputs = torch.cat([model(inputs) for inputs, _ in batches])

    expected = make_model()
    torch.manual_seed(1)
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), data_fn())
    assert torch.equal(outputs, plain_evaluation(expected))


def test_a_session_sets_modes_and_restores_them():
    cbtorch.initialize("CPU")
    model = cbtorch.module(make_model())
    model[1].eval()
    with pytest.raises(ValueError), cbtorch.Session([], modes.EVAL):
        assert not model.training and not torch.is_grad_enabled()
        with cbtorch.Session([], modes.TRAIN):
            assert model[1].training and torch.is_grad_enabled()
        assert not model.training and not torch.is_grad_enabled()
        raise ValueError
    assert model.training and not model[1].training and torch.is_grad_enabled()


def test_dataloader_accepts_a_loader_or_a_function():
    for source in (data_fn, data_fn()):
        loader = cbtorch.dataloader(source)
        assert isinstance(loader, DataExecutor)
        assert len(list(loader)) == len(list(loader)) == 5


def test_wrong_use_of_sessions_raises_with_the_reason(monkeypatch):
    monkeypatch.setattr(cbtorch._backend, "value", None)
    with pytest.raises(StreamError, match=r"initialize\(\) has not been called"):
        cbtorch.module(make_model())
    with pytest.raises(ConfigError, match="got Linear"):
        cbtorch.optimizer(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"modes\.TRAIN or modes\.EVAL"):
        cbtorch.Session([], "training")


def test_the_older_module_has_every_name():
    assert headwater.experimental.__version__ == headwater.__version__
    assert set(dir(headwater)) <= set(dir(headwater.experimental))
    with pytest.raises(AttributeError):
        headwater.experimental.no_such_name  # noqa: B018
