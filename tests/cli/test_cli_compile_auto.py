"""`compile: auto`: the choice is measured once, shown, recorded, and the same for all ranks."""

import json
import os
import shutil
import time

import pytest
import torch
from run_samples import assert_same_checkpoint, history, model_dir, write_params

from headwater.cli.main import main
from headwater.core.scratch import cache_folder
from headwater.fabric.launch.cores import num_cores
from headwater.plan.compilation import BlockTimes
from headwater.trainer import compile_choice

AUTO = (
    "--trainer.init.backend.compile=auto",
    "--trainer.init.precision.enabled=true",
    "--trainer.init.backend.matmul=exact",  # blocks are never compiled where fp32 kernels compute products
)
WITHOUT_EVALUATIONS = "--trainer.init.loop.eval_frequency=null"
"""A run without evaluations compiles one variant of the blocks instead of two."""

FASTER = BlockTimes(1.0, 2.0, 0.5, 1.0, noise=0.0, compile_s=0.01, compiler_bytes=1)
SLOWER = BlockTimes(1.0, 2.0, 1.5, 2.5, noise=0.0, compile_s=0.01, compiler_bytes=1)


class Clock:
    """A measurement with a planted result."""

    def __init__(self):
        self.times = SLOWER
        self.measured = 0

    def __call__(self, packed, conditions):
        assert conditions.precision == "bf16"
        self.measured += 1
        return self.times


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Replaces measurements of blocks. All runs are long enough, and nothing is stored yet."""
    clock = Clock()
    monkeypatch.setattr(compile_choice, "measure_block", clock)
    monkeypatch.setattr(compile_choice, "_too_short", lambda plan, steps: None)
    monkeypatch.setattr(compile_choice, "cache_file", lambda name: tmp_path / "cache" / name)
    return clock


def compilation_line(folder):
    """Return the line of a run's plan about compiled blocks."""
    text = " ".join((folder / "plan.txt").read_text().split())
    return text[text.index("blocks are") :].partition(" batch:")[0]


def forget(tmp_path):
    (tmp_path / "cache/compiled_blocks.json").unlink()


def test_blocks_are_measured_once_and_stay_eager_in_a_resumed_run(headwater, params, clock, tmp_path):
    assert headwater("fit", params, *AUTO)[0] == 0
    whole = tmp_path / "run"
    assert compilation_line(whole).startswith(
        "blocks are not compiled: compiled blocks take 133.3% of the time"
    )
    assert clock.measured == 1
    plain = tmp_path / "plain"
    assert headwater("fit", params, *AUTO[1:], model_dir(plain))[0] == 0
    assert history(whole) == history(plain)  # the measurement has changed nothing

    again = tmp_path / "again"
    assert headwater("fit", params, *AUTO, model_dir(again), "--max_steps=3")[0] == 0
    assert clock.measured == 1  # stored
    forget(tmp_path)
    clock.times = FASTER
    assert headwater("fit", params, *AUTO, model_dir(again))[0] == 0
    assert clock.measured == 1
    assert compilation_line(again) == "blocks are not compiled: this run began so, as its checkpoint records"
    assert_same_checkpoint(again / "checkpoint_6", whole / "checkpoint_6")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_blocks_stay_compiled_in_a_resumed_run_with_equal_bits(headwater, params, clock, tmp_path):
    clock.times = FASTER
    auto = (*AUTO, WITHOUT_EVALUATIONS)
    assert headwater("fit", params, *auto)[0] == 0
    whole = tmp_path / "run"
    assert compilation_line(whole).startswith("blocks are compiled: compiled blocks take 50.0% of the time")
    stopped = tmp_path / "stopped"
    assert headwater("fit", params, *auto, model_dir(stopped), "--max_steps=3")[0] == 0
    forget(tmp_path)
    clock.times = SLOWER
    assert headwater("fit", params, *auto, model_dir(stopped))[0] == 0
    assert compilation_line(stopped) == "blocks are compiled: this run began so, as its checkpoint records"
    assert_same_checkpoint(stopped / "checkpoint_6", whole / "checkpoint_6")
    fixed = tmp_path / "fixed"
    always = ("--trainer.init.backend.compile=true", *auto[1:])
    assert headwater("fit", params, *always, model_dir(fixed))[0] == 0
    assert_same_checkpoint(fixed / "checkpoint_6", whole / "checkpoint_6")


def test_stored_times_of_zero_are_measured_again(headwater, params, clock, tmp_path):
    assert headwater("fit", params, *AUTO, "--max_steps=1")[0] == 0
    path = tmp_path / "cache/compiled_blocks.json"
    entries = json.loads(path.read_text())
    for entry in entries.values():
        entry["times"] = dict.fromkeys(entry["times"], 0)
    path.write_text(json.dumps(entries))
    assert headwater("fit", params, *AUTO, "--max_steps=1", model_dir(tmp_path / "b"))[0] == 0
    assert clock.measured == 2


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_all_ranks_take_the_choice_of_the_first(data, clock, tmp_path, monkeypatch):
    clock.times = FASTER
    options = (*AUTO[1:], "--num_csx=2", WITHOUT_EVALUATIONS)
    params = write_params(tmp_path, data)
    fixed, auto = tmp_path / "fixed", tmp_path / "auto"
    command = ["fit", str(params), *options, model_dir(fixed), "--trainer.init.backend.compile=true"]
    assert main(command) == 0
    # Ranks are other processes, so they get the planted times from the file of stored times.
    planted = {}
    monkeypatch.setattr(
        compile_choice,
        "_remember",
        lambda key, times: planted.update({key: {"times": vars(times), "taken_s": time.time()}}),
    )
    monkeypatch.setattr(
        "headwater.cli.plan.block_choice",
        lambda *args, measure: compile_choice.block_choice(*args, measure=True),
    )
    for threads in {1, max(1, num_cores() // 2)}:  # of a rank, with OMP_NUM_THREADS=1 or without
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert main(["plan", str(params), *options, AUTO[0]]) == 0
    cache = tmp_path / "home/headwater/compiled_blocks.json"
    shutil.copytree(cache_folder(), cache.parent)  # with the rates of this machine and the native kernels
    cache.write_text(json.dumps(planted))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert main(["fit", str(params), *options, model_dir(auto), AUTO[0]]) == 0
    assert compilation_line(auto).startswith("blocks are compiled")
    assert history(auto) == history(fixed)


def test_the_plan_of_a_run_says_that_blocks_will_be_measured(headwater, params, clock):
    code, output, _ = headwater("plan", params, *AUTO)
    assert code == 0
    assert "blocks are not compiled: not measured yet" in output
    assert clock.measured == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--trainer.init.precision.enabled=false",), "an fp32 run keeps the bits of torch"),
        (("--trainer.init.backend.matmul=fast",), "other kernels replace single products"),
        (("--trainer.init.model.num_hidden_layers=1",), "no two stages have the same class and equal shapes"),
        (("--max_steps=null", "--trainer.init.loop.num_epochs=1"), "known only to the run itself"),
    ],
)
def test_a_plan_tells_why_blocks_stay_eager(headwater, params, clock, options, reason):
    code, output, error = headwater("plan", params, *AUTO, *options)
    assert code == 0, error
    assert reason in " ".join(output.split())


@pytest.mark.parametrize(("count", "refused"), [(3, False), (4, True)])
def test_blocks_with_many_constants_stay_eager(headwater, params, clock, monkeypatch, count, refused):
    monkeypatch.setattr(compile_choice._Run, "variants", lambda self, group: count)
    code, output, _ = headwater("plan", params, *AUTO)
    assert code == 0
    words = " ".join(output.split())
    assert ("training and evaluation need 9 variants, and torch compiles 8" in words) == refused
    assert ("not measured yet" in words) != refused


def test_a_short_run_is_not_measured(headwater, params, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_choice, "measure_block", None)
    assert headwater("fit", params, *AUTO, "--max_steps=1")[0] == 0
    line = compilation_line(tmp_path / "run")
    # A machine that is too busy to be measured has no predicted time.
    assert "saves at most 20%" in line or "the speed of this machine is not known" in line


def test_a_measurement_that_fails_leaves_blocks_eager(headwater, params, clock, tmp_path):
    clock.times = "a block could not be compiled and measured: no compiler"
    assert headwater("fit", params, *AUTO, "--max_steps=1")[0] == 0
    expected = "blocks are not compiled: blocks.1: a block could not be compiled and measured: no compiler"
    assert compilation_line(tmp_path / "run") == expected


def test_damaged_stored_times_are_measured_again(headwater, params, clock, tmp_path):
    assert headwater("fit", params, *AUTO, "--max_steps=1")[0] == 0
    path = tmp_path / "cache/compiled_blocks.json"
    entries = json.loads(path.read_text())
    for entry in entries.values():
        entry["times"]["noise"] = "small"
    path.write_text(json.dumps(entries))
    assert headwater("fit", params, *AUTO, "--max_steps=1", model_dir(tmp_path / "b"))[0] == 0
    assert clock.measured == 2
