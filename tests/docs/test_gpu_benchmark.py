"""The measurements on a GPU: every part runs with tiny models on the CPU, and keeps its rows."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import parts
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import Options
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.shapes import SHAPES, Load
from benchmarks.gpu.streaming_peers import MEGATRAIN, NotInstalledError
from benchmarks.gpu.train import RESULT, measured

from headwater.models.registry import build_model

STAND_INS = Path(__file__).parent / "stand_ins"


def rows_of(part, folder, monkeypatch):
    arguments = ["gpu", "--part", part, "--dry-run", "--out", str(folder), "--disk", str(folder)]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 0
    return {row["row"]: row for row in json.loads((folder / f"gpu_{part}_dry_run.json").read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.real_start
def test_results_of_tests_are_rows(tmp_path, monkeypatch):
    rows = rows_of("a", tmp_path, monkeypatch)
    assert rows["all tests"]["exit_code"] == 0
    assert [row["outcome"] for row in rows.values() if "outcome" in row] == ["passed"] * 3


def test_rates(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.rates.calibrate", lambda *args, **kwargs: None)
    rows = rows_of("b", tmp_path, monkeypatch)
    assert rows["copies both ways at once"]["gb_per_s"] > 0
    assert len(rows) == 11


@pytest.mark.slow
def test_peers(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda called, **options: called)  # a minute, without a GPU
    rows = rows_of("c", tmp_path, monkeypatch)
    for size in ("1.3B, 4 x 4096", "8B, 64 x 1024"):
        assert rows[f"headwater, {size}"]["tokens_per_s"] > 0
        dtype = "pure_bf16" if "8B" in size else "bf16"
        assert rows[f"fsdp2, {dtype}, {size}"]["tokens_per_s"] > 0
        assert "MEGATRAIN is not set" in rows[f"megatrain, pure_bf16, {size}"]["left_out"]
        assert "roundpipe is not installed here" in rows[f"roundpipe, {dtype}, {size}"]["left_out"]


@pytest.fixture
def stand_ins(monkeypatch):
    """Install stand-ins for RoundPipe and MegaTrain, which need a GPU."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv(MEGATRAIN, str(STAND_INS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("roundpipe", "infinity")]:
        del sys.modules[name]


@pytest.mark.parametrize("system", ["roundpipe", "megatrain"])
@pytest.mark.parametrize("dtype", ["bf16", "pure_bf16"])
def test_systems_that_stream_train_the_model_and_tokens_of_plain_pytorch(system, dtype, stand_ins):
    load = Load("tiny", sequence=16, batch=4, dtype=dtype, steps=4, warmup=0, device="cpu")
    wanted, found = measured("plain", load), measured(system, load)
    # The weights that they start from are rounded to bf16, and batches are divided.
    assert found["losses"] == pytest.approx(wanted["losses"], rel=2e-2)
    assert wanted["losses"][2] < 0.99 * wanted["losses"][0]
    if system == "roundpipe" and dtype == "bf16":
        assert found["optimizer"].endswith("its own failed: Ninja is required to load C++ extensions")


def test_a_wrong_folder_of_megatrain_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(MEGATRAIN, str(tmp_path))
    with pytest.raises(NotInstalledError, match="has no folder `infinity`"):
        measured("megatrain", Load("tiny", device="cpu"))


def test_large_models(tmp_path, monkeypatch):
    rows = rows_of("d", tmp_path, monkeypatch)
    assert all(row["predicted"]["host_bytes"] > 0 for row in rows.values())
    assert list(rows) == ["headwater, 14B", "headwater, 20B"]


def test_loss_curves(tmp_path, monkeypatch):
    rows = rows_of("e", tmp_path, monkeypatch)
    assert rows["comparison"]["two_tiers"]["equal_bits"]
    assert rows["comparison"]["device_and_cpu"]["largest_relative_difference"] == 0


@pytest.mark.slow
@pytest.mark.real_start
def test_a_system_in_its_own_process_prints_its_row():
    load = Load("tiny", sequence=8, batch=1, steps=1, warmup=0, device="cpu")
    command = [sys.executable, "-m", "benchmarks.gpu.train", "--system", "plain", *load.options()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=parts.ROOT, env=parts._environment())
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.split(RESULT)[-1])
    assert row["tokens_per_s"] > 0 and len(row["losses"]) == 1


def test_rows_stay_and_a_row_without_time_says_so(tmp_path):
    path, measured = tmp_path / "rows.json", []

    def run():
        measured.append(len(measured))
        return {"value": measured[-1]}

    def fail():
        raise ValueError("no memory")

    rows = Rows(path, 60, "cpu")
    rows.measure("first", run)
    rows.measure("failed", fail)
    rows.measure("large", run, least_s=1000)
    again = Rows(path, 60, "cpu")
    again.measure("first", run)
    again.measure("large", run)
    found = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert found["first"]["value"] == 0 and found["large"]["value"] == 1
    assert found["failed"]["failed"] == "ValueError: no memory"


def test_a_part_continues_after_the_rows_of_an_earlier_command(tmp_path):
    kept = tmp_path / "kept"
    Rows(tmp_path / "first" / "rows.json", 60, "cpu", kept).measure("row", lambda: {"value": 1})
    again = Rows(tmp_path / "second" / "rows.json", 60, "cpu", kept)
    again.measure("row", lambda: pytest.fail("it is measured"))
    again.measure("next", lambda: {"value": 2})
    found = json.loads((tmp_path / "second" / "rows.json").read_text())["rows"]
    assert [row["row"] for row in found] == ["row", "next"]


@pytest.mark.parametrize(("least", "reason"), [(0, "more than 1 s"), (1 << 60, "more host memory")])
def test_a_run_that_hangs_or_needs_all_memory_is_ended_with_its_processes(least, reason, monkeypatch):
    monkeypatch.setattr(parts, "free_host_bytes", lambda: -1 if least else 1 << 60)
    command = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline().strip().isdigit()
        guard = parts._Guard(process, 0.5)
        process.communicate(timeout=100)  # the child has the pipe too
        guard.stop()
    assert process.returncode == -signal.SIGKILL
    assert reason in guard.reason


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_their_names(name):
    model = build_model(SHAPES[name].config(64), device="meta")
    count = sum(param.numel() for param in model.parameters())
    assert abs(count / SHAPES[name].parameters - 1) < 0.01
    if name != "tiny":
        assert abs(count / 1e9 / float(name.removesuffix("B")) - 1) < 0.06


def test_a_dry_run_is_tiny():
    assert Options(dry_run=True, disk=None).load("20B", steps=20).tokens_per_step == 32
