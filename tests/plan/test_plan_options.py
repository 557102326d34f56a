"""Limits and decisions of a plan from the options of a backend."""

from pathlib import Path

import pytest
import torch
from synthetic import gpt

from headwater.config.sections import BackendConfig
from headwater.core.errors import ConfigError
from headwater.core.precision import Precision
from headwater.optim import OptimizerSpec
from headwater.optim.spec import NO_UPDATES
from headwater.plan import budget
from headwater.plan.budget import make_plan
from headwater.plan.options import (
    Fixed,
    PlanRequest,
    device_of,
    fixed_by,
    optimizer_state_bytes,
    resources_of,
)
from headwater.plan.types import Activations, Resources

GIB = 1 << 30


def test_what_is_automatic_is_left_to_the_planner():
    backend = BackendConfig()
    assert fixed_by(backend) == Fixed()
    assert resources_of(backend) == Resources()


def test_decisions_and_limits_of_the_user_are_those_of_the_request():
    backend = BackendConfig.model_validate(
        {
            "tier": "disk",
            "gradient_tier": "memory",
            "activations": "recompute",
            "optimizer_state": "bf16",
            "num_slabs": 3,
            "host_memory": "2GiB",
            "disk": {"path": "/tier", "size": "1GiB"},
        }
    )
    assert fixed_by(backend, 2) == Fixed("disk", 3, Activations.RECOMPUTE, 2, "memory", None, None, "bf16")
    assert resources_of(backend) == Resources(None, 2 * GIB, Path("/tier"), GIB)


def test_a_plan_for_the_allocator_of_the_system_needs_no_ranges(monkeypatch):
    def planned(allocator):
        fixed = fixed_by(BackendConfig.model_validate({"allocator": allocator}))
        given = {"batch_size": 4, "precision": Precision(), "optimizer_state_bytes": 8}
        return make_plan(PlanRequest(gpt(), resources=Resources(), fixed=fixed, **given))

    asked = []
    monkeypatch.setattr(budget, "tensor_ranges_available", lambda: asked.append("compile") or True)
    assert planned("tuned").ranges
    assert asked
    asked.clear()
    assert not planned("system").ranges
    assert not asked


def test_a_given_folder_replaces_that_of_the_disk_tier():
    backend = BackendConfig.model_validate({"disk": {"path": "/tier"}})
    assert resources_of(backend).disk == Path("/tier")


@pytest.mark.parametrize(
    ("backend_type", "finds_gpu", "device"),
    [("CPU", True, "cpu"), ("CSX", True, "cuda"), ("CSX", False, "cpu"), ("GPU", True, "cuda")],
)
def test_device_of_a_backend(backend_type, finds_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: finds_gpu)
    assert device_of(BackendConfig.model_validate({"backend_type": backend_type})) == device


def test_a_gpu_that_torch_does_not_find_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        device_of(BackendConfig.model_validate({"backend_type": "GPU"}))


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("AdamW", 8), ("SGD", 0), ("Adagrad", 4), ("RMSprop", 4)]
)
def test_bytes_of_optimizer_state_of_an_element(optimizer, expected):
    assert optimizer_state_bytes(OptimizerSpec(optimizer, {"lr": 0.1})) == expected
    assert optimizer_state_bytes(OptimizerSpec(optimizer, {"lr": 0.1}), stored="bf16") == expected // 2


def test_a_model_that_is_not_updated_has_no_optimizer_state():
    assert optimizer_state_bytes(NO_UPDATES) == 0
