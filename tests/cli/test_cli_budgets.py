"""Runs in their smallest budget, and in a control group that is too small."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from headwater.core.units import MIB, parse_bytes

GROUPS = Path("/sys/fs/cgroup/memory")  # cgroup v1
PARAMS = """\
extends: gpt/tiny
trainer:
  init:
    model_dir: {folder}/run
    model: {{vocab_size: 300, hidden_size: 64, num_hidden_layers: 2,
      num_heads: 2, max_position_embeddings: 16}}
    loop: {{max_steps: 2, eval_frequency: 2, eval_steps: 1}}
  fit:
    train_dataloader: {{data_dir: {data}/train, batch_size: 8, num_workers: 0}}
    val_dataloader: {{data_dir: {data}/val, batch_size: 8, num_workers: 0}}
"""


def fit(params, *words, group=None):
    """Exit status, output and peak of resident memory of a run in a process of its own."""
    output = params.with_suffix(".txt")
    enter = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    with output.open("w") as file:
        command = [sys.executable, "-m", "headwater", "fit", str(params), *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=enter)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, output.read_text(), usage.ru_maxrss * 1024


@pytest.fixture
def params(tmp_path, data):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS.format(folder=tmp_path, data=data))
    return path


@pytest.mark.slow
def test_the_remedy_of_a_refusal_is_a_budget_that_a_run_keeps(params):
    code, text, _ = fit(params, "--host_memory=1MiB")
    assert code == 2
    budget = parse_bytes(re.search(r"set host_memory ([\d.]+ \w+)", text)[1])
    code, text, peak = fit(params, f"--host_memory={budget}")
    assert code == 0, text
    assert peak <= 1.03 * budget


@pytest.mark.slow
@pytest.mark.skipif(not os.access(GROUPS / "cgroup.procs", os.W_OK), reason="needs root and cgroup v1")
def test_in_a_control_group_that_is_too_small_a_run_is_refused(params):
    group = GROUPS / f"headwater-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
        code, text, _ = fit(params, group=group)
    finally:
        group.rmdir()
    assert code == 2
    assert "does not fit" in text
