"""An engine built from the options of a backend trains as plain PyTorch."""

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api import planner
from headwater.api.compile import streamed
from headwater.api.engines import EngineSteps, build_engine
from headwater.config.sections import BackendConfig
from headwater.core.tensor_memory import range_bytes
from headwater.core.units import MIB
from headwater.core.warn_once import warn_once
from headwater.optim.spec import OptimizerSpec
from headwater.store.update import Update
from headwater.stream import compilation

SGD = OptimizerSpec("SGD", {"lr": 0.5})
BATCH = torch.ones(2, 3)


def loss_of(model, batch):
    return model(batch).square().mean()


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture(scope="module")
def plan():
    """Return the plan of a compiled model; another model of the same structure fits it."""
    model = hw.compile(make_model(), hw.backend("CSX", tier="memory"))
    model(BATCH)
    plan = streamed(model).engine.plan
    hw.release(model)
    return plan


def plainly_trained():
    model = make_model()
    loss_of(model, BATCH).backward()
    torch.optim.SGD(model.parameters(), **SGD.kwargs).step()
    return model


def test_an_engine_takes_its_own_steps(plan):
    model = make_model()
    steps = EngineSteps(loss_of, seed=1)
    with build_engine(model, plan, SGD, BackendConfig(), steps=steps) as engine:
        engine.train_step([BATCH], Update(1, {}))
        trained = dict(engine.named_masters())
    for name, value in plainly_trained().state_dict().items():
        assert torch.equal(trained[name], value), name


@pytest.mark.parametrize("allocator", ["tuned", "system"])
def test_the_loop_of_a_user_trains_an_engine_without_steps(plan, allocator):
    model = make_model()
    config = BackendConfig(allocator=allocator)
    with build_engine(model, plan, SGD, config) as engine:
        loss_of(model, BATCH).backward()
        engine.store.commit(Update(1, {}))
        trained = dict(engine.named_masters())
    for name, value in plainly_trained().state_dict().items():
        assert torch.equal(trained[name], value), name


def test_a_users_loop_gets_one_warning_that_auto_compiles_no_blocks(plan, caplog):
    warn_once.cache_clear()
    for _ in range(2):
        with build_engine(make_model(), plan, SGD, BackendConfig(compile="auto")):
            pass
    assert caplog.text.count("compile: auto does not compile blocks in your own loop") == 1


@pytest.mark.parametrize("option", [True, False, "auto"])
def test_the_plan_of_a_users_loop_says_whether_blocks_are_compiled(option, monkeypatch):
    compiled = []
    monkeypatch.setattr(compilation, "compile_forward", lambda module, name: compiled.append(name) or int)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    hw.compile(model, hw.backend("CSX", tier="memory", compile=option))
    model(BATCH)
    assert compiled == (["0", "1"] if option is True else [])
    assert streamed(model).engine.plan.blocks.compiled == (option is True)
    hw.release(model)


def use_and_free():
    """Free a tensor whose memory the ranges keep."""
    torch.empty(64 * MIB, dtype=torch.uint8)
    assert range_bytes().free >= 64 * MIB


def test_a_closed_engine_returns_the_memory_of_freed_tensors_to_the_system(plan):
    with build_engine(make_model(), plan, SGD, BackendConfig()):
        use_and_free()
    assert range_bytes().free == 0


def test_memory_of_freed_tensors_does_not_count_as_used_in_a_plan_for_a_larger_batch(monkeypatch):
    measured, resident_bytes = [], planner.resident_bytes

    def resident():
        measured.append(range_bytes().free)
        return resident_bytes()

    monkeypatch.setattr(planner, "resident_bytes", resident)
    model = hw.compile(make_model(), hw.backend("CSX", tier="memory"))
    model(BATCH)
    use_and_free()
    model(torch.ones(200, 3))
    hw.release(model)
    assert measured == [0]
