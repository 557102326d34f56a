"""A closed engine has freed all its device memory when it returns the cache of torch's allocator."""

import weakref

import pytest
from harness import History, Setting, regression
from test_device_double import double_of, on_double
from test_device_tier import steps_of
from torch import nn


def three():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))


@pytest.fixture
def double(monkeypatch):
    device = double_of(1, monkeypatch)
    yield device
    device.end()


@pytest.mark.parametrize(
    "setting", [Setting(on_device=(0, 1, 2)), Setting(), Setting("disk", on_device=(1,))], ids=str
)
def test_a_closed_engine_returns_all_its_device_memory_to_the_next_model(setting, double, tmp_path):
    job = regression(three, 8, 16)
    with double, on_double(job, setting, tmp_path) as engine:
        steps_of(engine, job, History(), range(2))
        engine.store.flush()
        workspaces = [weakref.ref(each) for each in workspaces_of(engine).values()]
        assert double.kept is None
    assert double.kept == 0, "slabs and stages are free before the cache is returned"
    assert all(workspace() is None for workspace in workspaces)


def workspaces_of(engine):
    return engine.store.access._stage_update._updater._workspaces._tensors
