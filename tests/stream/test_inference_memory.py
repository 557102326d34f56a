"""An evaluation uses the memory that its plan predicts, which is less than that of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_start

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import Fixed, make_plan
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.stream.engine import Engine

torch.set_num_threads(1)
WIDTH, DEPTH, ROWS = 512, 16, 8192  # 16 MiB for each activation

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def engine(depth, width, rows):
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        model = nn.Sequential(*layers, nn.Sequential(nn.Linear(width, 1), nn.Flatten(0)))
    def loss(model, x):
        return model(x).mean()
    trace = trace_step(model, torch.empty(rows, width, device="meta"), loss_function=loss, inference=True)
    plan = make_plan(
        lambda _: trace, batch_size=rows, precision=Precision(), optimizer_state_bytes=0,
        resources=Resources(host_memory=1 << 31, disk=Path(sys.argv[1]), disk_bytes=1 << 31),
        fixed=Fixed(tier=sys.argv[2], micro_batch_size=rows),
    )
    return Engine(
        model, plan, OptimizerSpec("SGD", {"lr": 0.0}), loss_function=loss,
        initial=lambda spec: torch.randn(spec.shape) * 0.01,
    )

with engine(2, 8, 8) as small:  # torch loads libraries at first use
    small.evaluate(torch.randn(8, 8))
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
with engine(DEPTH, WIDTH, ROWS) as large:
    batch = torch.randn(ROWS, WIDTH)
    for _ in range(2):
        large.evaluate(batch)
    parts = large.plan.prediction.host_parts
predicted = sum(parts.values()) - parts["interpreter"] + batch.nbytes
rise, kept = status("VmHWM") - before, 2 * DEPTH * batch.nbytes
print(json.dumps({"rise": rise, "predicted": predicted, "kept": kept}))
"""


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_evaluation_uses_no_more_memory_than_its_plan(tmp_path, tier):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), tier],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["predicted"] / 2 < result["rise"] <= result["predicted"] < result["kept"] / 2, result
