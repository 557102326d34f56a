"""A user's model through `run` on several ranks of one host and of two hosts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.namespaces import available
from own_models import assert_equal_checkpoints, history, write_params
from tests.api_loop.script_hosts import run_on_hosts

SCRIPT = Path(__file__).with_name("own_models.py")


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_two_hosts_are_bit_identical_to_two_ranks(tmp_path):
    words = ["--mode", "train_and_eval", "--num_csx", "2", "--params"]
    one, two = write_params(tmp_path, "one"), write_params(tmp_path, "two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, SCRIPT, *words, one], env=environment, check=True, capture_output=True)
    codes, logs = run_on_hosts(SCRIPT, (*words, two), tmp_path)
    assert codes == [0, 0], logs
    assert "done: step 6" in logs[0] and "done" not in logs[1]
    assert history(tmp_path / "two") == history(tmp_path / "one")
    assert_equal_checkpoints(tmp_path / "two/checkpoint_6", tmp_path / "one/checkpoint_6")
