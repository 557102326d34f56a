"""Offloaded activations use no more memory than the plan predicts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_start

SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from torch import nn
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Resources
from headwater.store.update import Update
from headwater.stream import offload
from headwater.stream.engine import Engine

torch.set_num_threads(1)
WIDTH, DEPTH, ROWS = 128, 24, 16384  # 8 MiB for each activation; a wider layer only computes longer

class SlowFile(offload.BlockFile):
    def write(self, offset, data):
        time.sleep(0.01)  # so that activations queue up
        super().write(offset, data)

offload.BlockFile = SlowFile

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def engine(depth, width, rows):
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        model = nn.Sequential(*layers, nn.Sequential(nn.Linear(width, 1), nn.Flatten(0)))
    def loss(model, x):
        return model(x).mean()
    trace = trace_step(model, torch.empty(rows, width, device="meta"), loss_function=loss)
    plan = make_plan(
        PlanRequest(
            lambda _: trace, batch_size=rows, precision=Precision(), optimizer_state_bytes=8,
            resources=Resources(host_memory=1 << 31, disk=Path(sys.argv[1]), disk_bytes=1 << 31),
            fixed=Fixed(activations=Activations.OFFLOAD, gradient_tier="disk", micro_batch_size=rows),
            checkpoints=False,
        )
    )
    return Engine(
        model, plan, OptimizerSpec("AdamW", {"lr": 1e-3}), loss_function=loss,
        initial=lambda spec: torch.randn(spec.shape) * 0.01,
    )

def train(streamed, batch):
    for step in range(2):
        streamed.train_step([batch], Update(step, {"lr": 1e-3}))

with engine(2, 64, 1024) as small:  # torch loads libraries at first use
    train(small, torch.randn(1024, 64))
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
with engine(DEPTH, WIDTH, ROWS) as large:
    batch = torch.randn(ROWS, WIDTH)
    train(large, batch)
    parts = large.plan.prediction.host_parts
predicted = sum(parts.values()) - parts["interpreter"] + batch.nbytes
rise, kept = status("VmHWM") - before, 2 * DEPTH * batch.nbytes
print(json.dumps({"rise": rise, "predicted": predicted, "kept": kept}))
"""


def test_offloaded_activations_stay_within_the_plan(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "4194304"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["predicted"] / 2 < result["rise"] <= result["predicted"] < result["kept"], result
