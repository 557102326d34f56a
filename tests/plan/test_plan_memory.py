"""The memory that a plan counts for the interpreter, data workers and the allocator."""

import dataclasses
import re
import subprocess
import sys
import time

import pytest
from synthetic import gpt

from headwater.core import buffers
from headwater.core.errors import DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB, parse_bytes
from headwater.models.workspace import WorkspacePool
from headwater.plan import budget, machine
from headwater.plan.budget import make_plan
from headwater.plan.cgroups import Level
from headwater.plan.machine import LATE_BYTES, WORKER_BYTES, free_resources, held_bytes, resident_bytes
from headwater.plan.options import PlanRequest
from headwater.plan.types import Resources


def plan_within(host_memory, shape=None, **changes):
    arguments = {
        "resources": Resources(host_memory=host_memory),
        "batch_size": 4,
        "precision": Precision("fp32"),
        "optimizer_state_bytes": 8,
    }
    return make_plan(PlanRequest(shape or gpt(layers=2, hidden=64), **(arguments | changes)))


def test_memory_loaded_by_the_dry_run_counts(monkeypatch):
    resident, trace_for = [100 * MIB], gpt(layers=2, hidden=64)

    def traced(size):
        resident[0] = 200 * MIB
        return trace_for(size)

    monkeypatch.setattr(budget, "resident_bytes", lambda: resident[0])
    plan = plan_within(8 * GIB, traced)
    assert plan.prediction.host_parts["interpreter"] == 200 * MIB + LATE_BYTES


def test_memory_of_data_workers_counts():
    plan = plan_within(8 * GIB, data_workers=3)
    assert plan.prediction.host_parts["data workers"] == 3 * WORKER_BYTES


def test_the_remedy_also_fits_a_slightly_larger_process(monkeypatch):
    monkeypatch.setattr(budget, "resident_bytes", lambda: 200 * MIB)
    with pytest.raises(DoesNotFitError) as refused:
        plan_within(100 * MIB)
    remedy = parse_bytes(re.search(r"set host_memory ([\d.]+ \w+)", str(refused.value))[1])
    monkeypatch.setattr(budget, "resident_bytes", lambda: 220 * MIB)
    assert plan_within(remedy).prediction.host_bytes <= remedy


def test_a_budget_beyond_the_limit_of_a_control_group_is_lowered(monkeypatch):
    monkeypatch.setattr(machine, "memory_levels", lambda: [Level(GIB, 0, 0)])
    assert free_resources(Resources(host_memory=4 * GIB), "cpu").host_memory == int(0.9 * GIB)
    assert free_resources(Resources(), "cpu").host_memory == int(0.9 * GIB)
    assert free_resources(Resources(host_memory=MIB), "cpu").host_memory == MIB


@pytest.mark.parametrize("asked", [None, 10 * MIB])
def test_a_refusal_in_a_control_group_names_a_sufficient_limit(monkeypatch, asked):
    levels = [Level(300 * MIB, 250 * MIB, 250 * MIB), Level(16 * GIB, 0, 0)]
    monkeypatch.setattr(machine, "memory_levels", lambda: levels)
    for module in (budget, machine):
        monkeypatch.setattr(module, "resident_bytes", lambda: 200 * MIB)
    with pytest.raises(DoesNotFitError) as refused:
        plan_within(asked)
    limit = parse_bytes(re.search(r"memory limit of the control group ([\d.]+ \w+)", str(refused.value))[1])
    words = re.search(r"and host_memory ([\d.]+ \w+)", str(refused.value))
    assert (words is None) == (asked is None)

    levels[0] = Level(limit, 250 * MIB, 250 * MIB)
    assert plan_within(asked and parse_bytes(words[1])).prediction.host_bytes <= 0.9 * limit
    levels[0] = Level(int(0.8 * limit), 250 * MIB, 250 * MIB)
    with pytest.raises(DoesNotFitError):
        plan_within(asked and parse_bytes(words[1]))


def test_memory_is_not_ample_near_the_budget():
    plan = plan_within(64 * GIB)
    assert plan.memory_is_ample
    near = Resources(host_memory=int(plan.prediction.host_bytes * 1.1))
    assert not dataclasses.replace(plan, budget=near).memory_is_ample


def test_pools_keep_no_memory_if_they_are_off(monkeypatch):
    import torch

    monkeypatch.setattr(buffers._MALLOC, "pools_keep", False)
    pool = WorkspacePool()
    with pool.borrow(torch.zeros(1), torch.float32, 1000):
        pass
    assert pool.idle_bytes == 0


def test_held_bytes_are_at_least_the_resident_bytes():
    resident = resident_bytes()  # first, because memory that is taken in between counts as held
    assert held_bytes() >= resident > 0


@pytest.mark.real_start  # a fork has memory of its server
def test_held_bytes_contain_the_memory_of_children():
    code = f"import sys; kept = bytearray(b'1') * {256 * MIB}; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        while held_bytes() < resident_bytes() + 256 * MIB:  # a second at most
            time.sleep(0.05)
        child.stdin.close()
    while held_bytes() >= resident_bytes() + 256 * MIB:
        time.sleep(0.05)
