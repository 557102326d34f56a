"""Blocks that do not fit are divided at their modules, and only these."""

import dataclasses
import functools
import io

import pytest
import torch
from rich.console import Console
from torch import nn

from headwater.config import load_params, shipped_params
from headwater.config.cluster import load_cluster
from headwater.core.errors import DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import MIB
from headwater.plan import repeats
from headwater.plan.budget import make_plan
from headwater.plan.division import divide, divisions
from headwater.plan.options import PlanRequest
from headwater.plan.partition import find_stages
from headwater.plan.report import group_stages, render_plan
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Phase, Plan, Resources
from headwater.trainer.planning import dry_runs
from headwater.trainer.simulation import cluster_of, simulate
from headwater.trainer.zoo_job import zoo_trainable

WIDTH = 256


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(self.mix(self.norm(x)) @ self.scale)


class Net(nn.Module):
    def __init__(self, layers=6, make=Block):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


MATRIX = 4 * WIDTH * WIDTH  # bytes of a square matrix in fp32


def divided(model, most_bytes):
    return divide(model, find_stages(model, Precision()), most_bytes)


def parts(partition):
    """Return the name and the parameters of each stage of the first block."""
    return {
        stage.name: [param.name.removeprefix("blocks.0.") for param in stage.params]
        for stage in partition.stages
        if stage.name.startswith("blocks.0")
    }


def test_large_modules_of_a_block_become_stages_and_small_parameters_stay():
    partition = divided(Net(), 4 * MATRIX)
    assert parts(partition) == {
        "blocks.0.mix": ["mix.weight"],
        "blocks.0.mlp.up": ["mlp.up.weight"],
        "blocks.0.mlp.down": ["mlp.down.weight"],
        "blocks.0": ["scale", "norm.weight", "norm.bias", "mix.bias", "mlp.up.bias", "mlp.down.bias"],
    }
    assert [stage.index for stage in partition.stages] == list(range(1 + 6 * 4))
    assert [stage.part_of for stage in partition.stages[:6]] == [None, 4, 4, 4, None, 8]


def test_a_module_that_is_small_enough_stays_whole():
    assert "blocks.0.mlp" in parts(divided(Net(), 8 * MATRIX + 1))


def test_stages_that_are_small_enough_and_matrices_are_not_divided():
    model = Net(make=functools.partial(nn.Linear, WIDTH, WIDTH))
    whole = find_stages(model, Precision())
    assert divide(model, whole, 1) == whole
    assert list(divisions(model, whole)) == []
    assert divided(Net(), 100 * MATRIX) == find_stages(Net(), Precision())


def test_layers_with_a_fast_path_are_not_divided():
    model = Net(make=functools.partial(nn.TransformerEncoderLayer, WIDTH, 4))
    assert divided(model, MATRIX) == find_stages(model, Precision())


def test_each_division_has_smaller_stages_than_the_one_before():
    model = Net()
    largest = [
        max(stage.slab_bytes for stage in partition.stages)
        for partition in (find_stages(model, Precision()), *divisions(model, find_stages(model, Precision())))
    ]
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] == 4 * MATRIX


def trace_of(model, partition):
    return trace_step(model, torch.zeros(4, 8), partition=partition)


@pytest.mark.parametrize("most_bytes", [100_000, 20_000])
def test_dry_runs_skip_equal_divided_blocks(most_bytes, monkeypatch):
    config = load_params(shipped_params()["gpt/tiny"], ["trainer.init.model.num_hidden_layers=8"])
    trainable = zoo_trainable(config.init)
    whole = find_stages(trainable.model, config.init.precision.precision)
    partition = divide(trainable.model, whole, most_bytes)
    assert partition != whole
    calls, output = [], repeats.Call.output
    monkeypatch.setattr(repeats.Call, "output", lambda *args: calls.append(args) or output(*args))
    skipping = dry_runs(config.init, trainable, partition=partition)(2)
    assert calls
    monkeypatch.setattr(repeats, "_equal_stages", lambda model, partition: [])
    assert skipping == dry_runs(config.init, trainable, partition=partition)(2)


def request(model, resources):
    whole = find_stages(model, Precision())
    finer = [functools.cache(lambda size, p=p: trace_of(model, p)) for p in divisions(model, whole)]
    return PlanRequest(
        functools.cache(lambda size: trace_of(model, whole)),
        batch_size=4,
        precision=Precision(),
        optimizer_state_bytes=8,
        resources=resources,
        base_bytes=8 * MIB,
        divided=lambda: finer,
    )


def test_blocks_are_divided_only_if_no_plan_fits(tmp_path):
    asked = request(Net(), Resources(host_memory=72 * MIB, disk=tmp_path, disk_bytes=1024 * MIB))
    with pytest.raises(DoesNotFitError):
        make_plan(dataclasses.replace(asked, divided=tuple))
    plan = make_plan(asked)
    assert plan.prediction.host_bytes <= 72 * MIB
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    assert "blocks.0…5 are each divided into 4 stages" in console.export_text()
    groups = group_stages(plan)
    assert sum(group.count for group in groups) == len(plan.trace.stages) > len(groups)

    ample = dataclasses.replace(asked, resources=Resources(host_memory=1024 * MIB))
    assert make_plan(ample).trace.members == {}


def test_a_refusal_names_the_largest_stage(tmp_path):
    asked = request(Net(), Resources(host_memory=4 * MIB, disk=tmp_path, disk_bytes=1024 * MIB))
    with pytest.raises(DoesNotFitError, match=r"largest stage: blocks\.0\.mlp\.up, 1\.00 MiB of weights"):
        make_plan(asked)


@pytest.mark.parametrize("disk_bytes", [MIB, 1024 * MIB])
def test_without_room_for_the_store_only_the_smallest_stages_get_a_dry_run(tmp_path, disk_bytes):
    """They are in the text of the refusal. With room for the store, but not for a stage, all are tried."""
    asked = request(Net(), Resources(host_memory=4 * MIB, disk=tmp_path, disk_bytes=disk_bytes))
    finer, used = [*asked.divided()] * 3, []

    def noted(number, size):
        used.append(number)
        return finer[number](size)

    divided = [functools.partial(noted, number) for number in range(len(finer))]
    with pytest.raises(DoesNotFitError) as lazy:
        make_plan(dataclasses.replace(asked, divided=lambda: divided))
    assert set(used) == ({2} if disk_bytes == MIB else {0, 1, 2})
    if disk_bytes == MIB:
        with pytest.raises(DoesNotFitError) as smallest:
            make_plan(dataclasses.replace(asked, divided=lambda: finer[-1:]))
        assert str(lazy.value) == str(smallest.value)


def test_a_recomputed_block_is_used_once_more_before_its_backward():
    model = Net(layers=2)
    trace = trace_of(model, divided(model, 4 * MATRIX))
    policies = [
        Activations.RECOMPUTE if trace.blocks[stage] == 4 else Activations.KEEP
        for stage in range(len(trace.stages))
    ]
    plan = Plan(trace, Precision(), "cpu", "memory", False, 2, tuple(policies), 4, 1, "memory")
    inside = [place for place, stage in enumerate(trace.uses) if trace.blocks[stage] == 4]
    again = [visit.use for visit in plan.visits if visit.phase is Phase.AGAIN]
    back = [visit.use for visit in plan.visits if visit.phase is Phase.BACKWARD]
    assert again == inside
    assert back == [*reversed(range(len(trace.uses)))]
    assert len(plan.schedule) == 2 * len(trace.uses) + len(inside)


def simulated(layers):
    """Return the step of a GPT with blocks of 7.9 billion parameters on a CS-2."""
    shape = {"hidden_size": 25600, "num_hidden_layers": layers, "num_heads": 160, "filter_size": 102400}
    keys = [f"trainer.init.model.{name}={value}" for name, value in shape.items()]
    config = load_params(shipped_params()["gpt/cerebras_gpt_6p7b"], keys)
    cluster = cluster_of(load_cluster("cs2"), "cs2")
    found = simulate(config.init, zoo_trainable(config.init), 1, cluster, counts=[1], scaling="weak")
    return found.points[0]


def test_blocks_of_eight_billion_parameters_are_divided_on_a_cs2():
    plan = simulated(layers=8).plan
    assert plan.prediction.device_bytes <= 40 * 10**9
    assert "blocks.7.ffn.input" in [stage.name for stage in plan.trace.stages]


@pytest.mark.slow
def test_a_model_of_a_trillion_parameters_is_planned_on_a_cs2():
    point = simulated(layers=128)
    assert sum(stage.numel for stage in point.plan.trace.stages) > 1e12
    assert point.plan.prediction.device_bytes <= 40 * 10**9
    assert point.step.step_s > 0
