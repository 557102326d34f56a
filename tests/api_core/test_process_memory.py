"""The plans of a user's loop count the memory that the process already has, and that of other models."""

import json
import subprocess
import sys

import pytest

from headwater.core.units import MIB

LOOP = """
import json, sys, threading
from contextlib import nullcontext
import psutil, torch
from torch import nn
import headwater as hw
from headwater.api.registry import streamed_models
from headwater.core.errors import HeadwaterError

kind, limit, disk = sys.argv[1], int(sys.argv[2]), sys.argv[3]
process, peak, stop = psutil.Process(), [0], threading.Event()

def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], process.memory_info().rss)

def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(24)))

torch.manual_seed(0)
folder = {"disk": disk} if disk else {}
with hw.backend("CSX", **folder).device if disk else nullcontext():
    models = [net() for _ in range(2 if kind == "two" else 1)]
if kind == "bf16":
    models = [model.bfloat16() for model in models]
for frozen in models[1:]:
    frozen.requires_grad_(False)
x = torch.randn(16, 1024, dtype=next(models[0].parameters()).dtype)
before = process.memory_info().rss
backend = hw.backend("CSX", host_memory=before + limit, **folder)
models = [hw.compile(model, backend) for model in models]
optimizer = torch.optim.AdamW(models[0].parameters())
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
error, losses = None, []
try:
    for _ in range(3):
        outputs = [models[0](x)]
        with torch.no_grad():
            outputs += [model(x) for model in models[1:]]
        loss = sum(output.float().square().mean() for output in outputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
except HeadwaterError as refused:
    error = str(refused)
stop.set()
watcher.join()
plans = [model.current.engine.plan for model in streamed_models()]
print(json.dumps({
    "error": error, "losses": losses, "before": before, "peak": peak[0],
    "predicted": [plan.prediction.host_bytes for plan in plans], "tiers": [plan.tier for plan in plans],
}))
"""


def run(kind, limit, disk=""):
    command = [sys.executable, "-c", LOOP, kind, str(limit), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.real_start
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_the_weights_of_a_plain_model_count_once(kind):
    found = run(kind, 4096 * MIB)
    [predicted] = found["predicted"]
    assert found["error"] is None
    assert 0.95 * found["peak"] < predicted < 1.15 * found["peak"]


@pytest.mark.real_start
def test_a_second_model_is_refused_if_both_exceed_the_limit():
    free = run("two", 4096 * MIB)
    first, both = free["predicted"]
    assert both > first + 60 * MIB
    found = run("two", first + 30 * MIB - free["before"])
    assert "together with the other models that this process streams" in found["error"]
    assert "lower limits for those models" in found["error"]


@pytest.mark.real_start
def test_a_second_model_goes_to_disk_if_both_exceed_the_limit(tmp_path):
    free = run("two", 4096 * MIB, tmp_path)
    assert free["tiers"] == ["memory", "memory"]
    limit = free["predicted"][1] - 50 * MIB - free["before"]
    limited = run("two", limit, tmp_path)
    assert limited["error"] is None
    assert limited["tiers"] == ["memory", "disk"]
    assert limited["losses"] == free["losses"]
    assert limited["peak"] < limited["before"] + limit
