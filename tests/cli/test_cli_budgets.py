"""Runs in their smallest budget, and in a control group that is too small."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from headwater.cli.main import main
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


RUN = """\
import sys
from headwater.cli.main import main
code = main(sys.argv[1:])
# Before the interpreter ends: while it ends, a build of torch with CUDA reads 120 MiB more of its libraries.
print("peak in KiB:", open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
sys.exit(code)
"""


def fit(params, *words, group=None):
    """Return exit status, output and peak of resident memory, in bytes, of a run in a new process."""
    enter = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    done = subprocess.run(
        [sys.executable, "-c", RUN, "fit", str(params), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=enter,
    )
    return done.returncode, done.stdout, int(done.stdout.split("peak in KiB: ")[1]) * 1024


@pytest.fixture
def params(tmp_path, data):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS.format(folder=tmp_path, data=data))
    return path


@pytest.mark.slow
def test_a_run_keeps_the_budget_that_a_refusal_suggests(params):
    code, text, _ = fit(params, "--host_memory=1MiB")
    assert code == 2
    budget = parse_bytes(re.search(r"set host_memory ([\d.]+ \w+)", text)[1])
    code, text, peak = fit(params, f"--host_memory={budget}")
    assert code == 0, text
    assert peak <= 1.03 * budget


@pytest.mark.slow
@pytest.mark.skipif(not os.access(GROUPS / "cgroup.procs", os.W_OK), reason="needs root and cgroup v1")
def test_in_a_control_group_that_is_too_small_the_refusal_names_a_limit_that_works(params, tmp_path):
    # A run compiles kernels that are not in the cache. A compiler does not fit into the group beside it.
    assert main(["fit", str(params), f"--trainer.init.model_dir={tmp_path / 'first'}"]) == 0
    group = GROUPS / f"headwater-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))
        code, text, _ = fit(params, group=group)
        assert code == 2
        assert "does not fit" in text
        limit = parse_bytes(re.search(r"memory limit of the control group ([\d.]+ \w+)", text)[1])
        (group / "memory.limit_in_bytes").write_text(str(limit))
        code, text, _ = fit(params, group=group)
        assert code == 0, text
    finally:
        while (group / "cgroup.procs").read_text().strip():  # helper processes end a moment later
            time.sleep(0.05)
        group.rmdir()
