"""A closed engine has freed all its device memory when it returns the cache of torch's allocator."""

import gc
import weakref

import pytest
from harness import History, Setting, make_engine, regression
from test_device_double import double_of, on_double
from test_device_tier import steps_of
from torch import nn

from headwater.core.errors import StreamError


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


def with_statistics():
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("slabs", [1, 99])
@pytest.mark.parametrize("activations", ["keep", "recompute", "selective", "offload"])
def test_parameters_and_buffers_are_freed_with_the_model_of_a_closed_engine(
    activations, slabs, double, no_collection, tmp_path
):
    """On a GPU the placeholder of each parameter takes 512 bytes, and buffers may be large."""
    assert not any(each() for each in tensors_of_closed_engine(activations, slabs, double, tmp_path))


def tensors_of_closed_engine(activations, slabs, double, folder):
    """Train, and return weak references to the model and the memory of its tensors."""
    job = regression(with_statistics, 8, 16)
    with double, on_double(job, Setting("memory", slabs, activations), folder) as engine:
        steps_of(engine, job, History(), range(2))
    assert all(param.isnan().all() for param in engine.model.parameters())
    tensors = [*engine.model.parameters(), *engine.model.buffers()]
    return [weakref.ref(engine.model), *(weakref.ref(each.untyped_storage()) for each in tensors)]


CLOSED = "closed between this forward and its backward"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (Setting("memory", 1, "keep"), CLOSED),
        (Setting("memory", 1, "recompute"), CLOSED),
        (Setting("memory", 1, "selective"), CLOSED),
        (Setting("memory", 1, "offload"), CLOSED),
        (Setting("memory", 99, "recompute"), CLOSED),
        # Here autograd has saved the parameters themselves, whose version counters show the change.
        (Setting("memory", 99, "keep"), "modified by an inplace operation"),
        (Setting("memory", 99, "selective"), "that backward needs was changed in place"),
    ],
    ids=str,
)
def test_a_backward_through_a_closed_engine_names_the_reason(setting, reason, tmp_path):
    """The parameters hold NaN, so a backward without this error would return gradients of NaN."""
    job = regression(three, 8, 16)
    with make_engine(job, setting, tmp_path) as engine:
        loss = job.loss(engine.model, job.make_batch(0, 0).requires_grad_())
    with pytest.raises((StreamError, RuntimeError), match=reason):
        loss.backward()
