"""A model a thousand times larger than the machine is compiled and validated in little memory."""

import subprocess
import sys

import pytest

from headwater.core.units import GIB

pytestmark = pytest.mark.real_start

SCRIPT = r"""
import re, sys, torch
from pathlib import Path
from headwater.api.without_training import compile_only
from headwater.config import find_params, load_params
from headwater.models.registry import build_model
from headwater.plan.types import Resources

init = load_params(find_params("gpt/175b")).init
names = ("input_ids", "attention_mask", "labels")
report = compile_only(
    build_model(init.model, device="meta"),
    {name: torch.empty(1, 2048, dtype=torch.int64, device="meta") for name in names},
    optimizer=init.optimizer_spec,
    precision=init.precision.precision,
    compile_dir=sys.argv[1],
    resources=Resources(host_memory=1 << 33),
)
print(sum(stage.numel for stage in report.record.trace.stages))
print([len(graph.modules) for graph in report.captured.graphs], report.plan)
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # of this process alone
"""


def test_a_model_of_175_billion_parameters_is_compiled_in_little_memory(tmp_path):
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=240)
    parameters, graphs, peak_kib = run.stdout.splitlines()
    assert int(parameters) == pytest.approx(175e9, rel=0.01)
    assert graphs == "[1, 1, 96, 1, 1] None"  # embeddings, blocks, norm, head; no plan for 8 GiB
    assert int(peak_kib) << 10 < GIB
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 5e6
