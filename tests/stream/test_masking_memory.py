"""The plan counts the memory in which masks are chosen and changed: against measured peaks."""

import json

import pytest
from process_memory import outputs_of

pytestmark = [pytest.mark.real_start, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from process_memory import peak_bytes, reset_peak
from headwater.core.precision import Precision
from headwater.core.units import GIB
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.step_trace import MaskedWeights
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources
from headwater.sparsity.schedules import Cadence, Constant
from headwater.sparsity.sparsifier import Sparsifier, Sparsity
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions
from headwater.trainer.sparse import SparseTraining

torch.set_num_threads(1)

def loss(model, x):
    return model(x).square().mean()

def engine_of(width, depth, case, folder):
    precision, tier, sparsity = Precision(case["precision"]), case["tier"], case["sparsity"]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    trace = trace_step(model, torch.empty(8, width, device="meta"), precision, loss_function=loss)
    group = Sparsity(Constant(sparsity), "rigl", "random", Constant(0.3), Cadence(1), ("*.weight",))
    sparsifier = Sparsifier([group], {name: p.shape for name, p in model.named_parameters()})
    request = PlanRequest(
        lambda _: trace,
        batch_size=8,
        precision=precision,
        optimizer_state_bytes=8,
        resources=Resources(host_memory=4 * GIB, disk=folder, disk_bytes=4 * GIB),
        fixed=Fixed(tier, gradient_tier=tier, micro_batch_size=8, num_slabs=2 if tier == "disk" else None),
        checkpoints=False,
        kept={name: sparsifier.capacity(name) for name in sparsifier.names},
        masks=MaskedWeights(depth * width**2 // 8, width**2, width**2),
    )
    plan = make_plan(request)
    options = EngineOptions(first_mask=sparsifier.first)
    initial = lambda spec: torch.randn(spec.shape) * 0.01
    adamw = OptimizerSpec("AdamW", {"lr": 1e-3})
    return Engine(model, plan, adamw, loss_function=loss, initial=initial, options=options), sparsifier

def train(engine, sparsifier, width):
    with engine:
        sparse, rises = SparseTraining(sparsifier, engine.store), []
        sparse.begin()
        whole = 0
        def masked(update):
            nonlocal whole
            whole = max(whole, peak_bytes())
            before = reset_peak()
            sparse.before_update(update.step)
            rises.append(peak_bytes() - before)
        for step in range(1, 3):
            engine.train_step([torch.randn(8, width)], Update(step, {"lr": 1e-3}), masked)
        return max(whole, peak_bytes()), rises

def measure(case, folder):
    train(*engine_of(64, 2, case, folder), 64)  # torch loads libraries at first use
    before = reset_peak()
    engine, sparsifier = engine_of(2048, 3, case, folder)
    parts = engine.plan.prediction.host_parts
    peak, rises = train(engine, sparsifier, 2048)
    print(json.dumps({"rise": peak - before, "masking": rises[-1], "parts": parts}), flush=True)

for case in json.loads(sys.argv[2]):  # a process each: this one has imported torch, and started no thread
    child = os.fork()
    if child == 0:
        measure(case, Path(sys.argv[1]))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{case} failed")
"""

CASES = {
    "fp32": {"precision": "fp32", "tier": "memory", "sparsity": 0.9},
    "bf16 on disk": {"precision": "bf16", "tier": "disk", "sparsity": 0.75},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    words = tmp_path_factory.mktemp("disk"), json.dumps(list(CASES.values()))
    return dict(zip(CASES, outputs_of(SCRIPT, *words, mmap_threshold=1 << 16), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_masks_change_stays_within_its_plan(case, measured):
    parts = measured[case]["parts"]
    planned = sum(parts.values()) - parts["interpreter"]
    assert 0.8 * planned < measured[case]["rise"] <= planned


def test_the_change_of_a_mask_takes_the_bytes_of_the_plan(measured):
    found = measured["fp32"]
    assert found["masking"] == pytest.approx(found["parts"]["masking"], rel=0.03)
