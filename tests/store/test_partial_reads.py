"""A parameter on disk is read and written without the rest of its stage."""

import os

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.disk import DiskTier
from headwater.store.rule import UpdateRule

SHAPES = [(300, 1000), (7,), (1100, 1003), (64, 1000)]
FROZEN = 3


def make_store(folder, wire, verify=False):
    params = tuple(
        ParamSpec(f"p{index}", shape, torch.float32, wire, requires_grad=index != FROZEN)
        for index, shape in enumerate(SHAPES)
    )
    store = build_store(
        [StageSpec(0, "block", params)],
        UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1})),
        lambda own: DiskTier(own.layouts, folder, verify=verify),
        on_disk=[0],
    )
    values = {index: {} for index in range(len(SHAPES))}

    def fill(piece):
        torch.manual_seed(piece.param * 1000 + piece.start)
        for name, target in {None: piece.master, **piece.states}.items():
            target.copy_(torch.randn(target.shape))
            values[piece.param].setdefault(name, []).append(target.flatten().clone())

    store.parameters.write(0, fill)
    store.tier.settle()
    flat = {param: {name: torch.cat(runs) for name, runs in own.items()} for param, own in values.items()}
    return store, flat


def assert_holds(store, values):
    for param, own in values.items():
        for name, value in own.items():
            assert torch.equal(store.parameters.read_param((0, param), name).view(-1), value), (param, name)


@pytest.fixture
def moved(monkeypatch):
    """Count the bytes of all direct reads and writes."""
    counts = {"preadv": 0, "pwrite": 0}
    for name in counts:
        system = getattr(os, name)

        def count(file, views, offset, name=name, system=system):
            done = system(file, views, offset)
            counts[name] += done
            return done

        monkeypatch.setattr(os, name, count)
    return counts


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_a_parameter_is_read_without_the_rest_of_its_stage(wire, tmp_path, moved):
    store, values = make_store(tmp_path, wire)
    moved["preadv"] = 0
    for param, shape in enumerate(SHAPES):
        for name in values[param]:
            before = moved["preadv"]
            assert torch.equal(store.parameters.read_param((0, param), name).view(-1), values[param][name])
            own = 4 * torch.Size(shape).numel()
            assert moved["preadv"] - before <= (own if name is None else 2 * own) + 10 * 4096
    store.close()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", [None, "exp_avg"])
@pytest.mark.parametrize("param", [0, 1, 2])
def test_a_changed_parameter_leaves_its_neighbours_as_they_were(param, name, verify, tmp_path, moved):
    store, values = make_store(tmp_path, torch.bfloat16, verify)
    new = torch.randn(SHAPES[param])
    before = moved["pwrite"]
    moved["preadv"] = 0
    store.parameters.write_param((0, param), new, name)
    store.tier.settle()
    if not verify:
        assert moved["pwrite"] - before <= 8 * new.numel() + 8 * 4096
        assert moved["preadv"] <= 16 * 4096  # the pages that it shares with its neighbours
    values[param][name] = new.view(-1)
    assert_holds(store, values)
    store.close()
