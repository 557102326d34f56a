"""Models that a script drops without a release: they are freed, and their optimizers may outlive them."""

import copy
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from any_loop import PLANS, Place, adamw, check, every_plan
from torch import nn


def trained(place):
    torch.manual_seed(0)
    model = place.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = adamw(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("plan", PLANS)
def test_a_dropped_model_is_freed_with_its_store_and_its_threads(plan, tmp_path):
    threads = set(threading.enumerate())
    model, optimizer = trained(Place(plan, tmp_path))
    engine = vars(model)["_headwater"].engine
    references = [weakref.ref(each) for each in (model, model[0].weight, optimizer, engine, engine.store)]
    del model, optimizer, engine
    for _ in range(600):
        gc.collect()  # again after each write to a file that was under way: its thread refers to the tier
        left = set(threading.enumerate()) - threads
        if not left:
            break
        left.pop().join(0.2)
    assert [reference() for reference in references] == [None] * len(references)
    assert set(threading.enumerate()) <= threads
    files = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert [file for file in files if file.startswith(str(tmp_path))] == []


@every_plan
def test_an_optimizer_outlives_its_dropped_model(plan, tmp_path):
    def script(place):
        model, optimizer = trained(place)
        place._compiled.clear()
        params = list(model.parameters())
        del model
        gc.collect()
        state = copy.deepcopy(optimizer.state_dict())
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        return [state, [param.detach().clone() for param in params], optimizer]

    check(script, plan, tmp_path)
