"""An evaluation uses the memory that its plan predicts, which is less than that of training."""

import pytest
from process_memory import outputs_of

pytestmark = pytest.mark.real_start

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.stream.engine import Engine
from process_memory import peak_bytes, reset_peak

torch.set_num_threads(1)
WIDTH, DEPTH, ROWS = 128, 16, 16384  # 8 MiB for each activation; a wider layer only computes longer

def engine(tier, depth, width, rows):
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        model = nn.Sequential(*layers, nn.Sequential(nn.Linear(width, 1), nn.Flatten(0)))
    def loss(model, x):
        return model(x).mean()
    trace = trace_step(model, torch.empty(rows, width, device="meta"), loss_function=loss, inference=True)
    plan = make_plan(
        PlanRequest(
            lambda _: trace, batch_size=rows, precision=Precision(), optimizer_state_bytes=0,
            resources=Resources(host_memory=1 << 31, disk=Path(sys.argv[1]), disk_bytes=1 << 31),
            fixed=Fixed(tier=tier, micro_batch_size=rows),
        )
    )
    return Engine(
        model, plan, OptimizerSpec("SGD", {"lr": 0.0}), loss_function=loss,
        initial=lambda spec: torch.randn(spec.shape) * 0.01,
    )

def measure(tier):
    with engine(tier, 2, 8, 8) as small:  # torch loads libraries at first use
        small.evaluate(torch.randn(8, 8))
    before = reset_peak()
    with engine(tier, DEPTH, WIDTH, ROWS) as large:
        batch = torch.randn(ROWS, WIDTH)
        for _ in range(2):
            large.evaluate(batch)
        parts = large.plan.prediction.host_parts
    predicted = sum(parts.values()) - parts["interpreter"] + batch.nbytes
    rise, kept = peak_bytes() - before, 2 * DEPTH * batch.nbytes
    print(json.dumps({"rise": rise, "predicted": predicted, "kept": kept}), flush=True)

for tier in sys.argv[2:]:  # a process each: this one has imported torch, and started no thread
    child = os.fork()
    if child == 0:
        measure(tier)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{tier} failed")
"""


def test_an_evaluation_uses_no_more_memory_than_its_plan(tmp_path):
    results = outputs_of(SCRIPT, tmp_path, "memory", "disk", mmap_threshold=1 << 16)
    assert len(results) == 2
    for result in results:
        assert result["predicted"] / 2 < result["rise"] <= result["predicted"] < result["kept"] / 2, result
