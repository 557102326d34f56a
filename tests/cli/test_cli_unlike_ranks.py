"""Ranks that somebody has started with different things are refused before they train."""

import os
import shutil
import socket
import subprocess
import sys

import h5py
import pytest

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")


def started(params, port, *options):
    """Run two ranks with different options; return their exit codes and outputs."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "headwater", "fit", str(params), "--num_csx=2", *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank, own in enumerate(options)
    ]
    printed = [" ".join(rank.communicate(timeout=120)[0].split()) for rank in ranks]
    return [rank.returncode for rank in ranks], printed


@pytest.fixture
def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_ranks_with_different_params_are_refused(params, port, tmp_path):
    codes, printed = started(params, port, ["--seed=1"], ["--seed=2"])
    assert 0 not in codes
    assert "trainer.init.seed differs between ranks: rank 0 has 1, rank 1 has 2" in printed[0]
    assert not (tmp_path / "run/history.jsonl").exists()


def test_ranks_with_different_data_are_refused(params, data, port, tmp_path):
    shutil.copytree(data / "train", tmp_path / "other")
    with h5py.File(next((tmp_path / "other").glob("*.h5")), "r+") as file:
        file["data"][0, 0, 0] += 1
    other = f"--trainer.fit.train_dataloader.data_dir={tmp_path}/other"
    codes, printed = started(params, port, [], [other])
    assert 0 not in codes
    assert "training set differs between ranks: rank 0 has" in printed[0]
    codes, _ = started(params, port, [], [f"--trainer.fit.train_dataloader.data_dir={data}/./train"])
    assert codes == [0, 0], "the same data may lie elsewhere"


def test_a_port_that_is_taken(params, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        codes, printed = started(params, port, [])
    assert codes == [2] or codes == [1]
    assert "rendezvous failed" in printed[0] and f"127.0.0.1:{port}" in printed[0]
