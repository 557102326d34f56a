"""Benchmarks: every module prints its help, and accepts the commands of the pages; a failure is a row."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import curves, large, memory, options, params_files, plan_truth, ranks, runner
from benchmarks.runner import FailedRunError, Results, System, interleave, reason_of, table
from benchmarks.systems import deepspeed_
from benchmarks.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"(?:`python -m |^\| `)(benchmarks[\w.]*)([^`]*)`", re.MULTILINE)
"""A command in a text, or in the first column of a table, where commands are without `python -m`."""
_TINY = Workload(layers=1, width=8, heads=1, vocab=16, sequence=4, batch=1)


def module_of(path):
    """Return the module name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
PROGRAMS = [module_of(path) for path in FILES if 'if __name__ == "__main__"' in path.read_text()]


def commands():
    """Return the module and the options of every command, by page and command."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *FILES]
    return {
        f"{page.relative_to(ROOT)}: {found[0]}": (found[1], found[2])
        for page in sorted(pages)
        for found in _COMMAND.finditer(page.read_text())
    }


def parser_of(module):
    """Return the parser of a program; its name may be that of a package."""
    name = module if module in PROGRAMS else f"{module}.__main__"
    return importlib.import_module(name).make_parser()


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_benchmark_prints_its_help(module):
    assert "--help" in parser_of(module).format_help()


@pytest.mark.parametrize(("module", "options"), commands().values(), ids=commands())
def test_benchmark_accepts_the_command_of_a_page(module, options):
    mandatory = re.sub(r"\[.*?\]", "", options).replace("COUNT", "3")
    parser_of(module).parse_args(shlex.split(mandatory))


def test_pages_have_commands_of_benchmarks():
    found = {module for module, _ in commands().values()}
    assert {"benchmarks.speed", "benchmarks.kill", "benchmarks.transformers_walk"} <= found


@pytest.mark.real_start  # these processes import nothing
def test_a_system_that_fails_is_a_row_with_the_reason_and_others_still_run(capfd):
    systems = [System("first", "no_such_module"), System("second", "no_such_module")]
    results = interleave(systems, _TINY, rounds=2, disk=None)
    rows = results.failed_rows()
    assert [row["system"] for row in rows] == ["first", "second"]
    assert all("No module named benchmarks.systems.no_such_module" in row["failed"] for row in rows)
    assert results.runs == {}
    assert capfd.readouterr().err.count("failed: ") == 2


@pytest.mark.real_start
def test_a_system_that_takes_too_long_is_ended_and_a_row_says_so():
    results = interleave([System("slow", "torch_", limit_s=0.01)], _TINY, rounds=2, disk=None)
    (row,) = results.failed_rows()
    assert row["failed"].startswith("no result within 0 s; its last line: ")


@pytest.mark.real_start
def test_plain_pytorch_and_the_streamed_run_of_one_model_have_equal_losses(tmp_path):
    workload = Workload(layers=2, width=64, heads=2, vocab=300, sequence=16, batch=2, dtype="fp32", steps=2)
    systems = [System("plain", "zoo_"), System("disk", "headwater_", ("--tier=disk", "--disk={disk}"))]
    runs = interleave(systems, workload, rounds=1, disk=tmp_path).runs
    losses = {name: (run["first_loss"], run["last_loss"]) for name, (run,) in runs.items()}
    assert losses["disk"] == losses["plain"]
    assert losses["plain"][0] != losses["plain"][1], "a loss that stays the same shows nothing"


def test_locks_that_a_killed_run_has_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "elsewhere")
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "lock").touch()
    (tmp_path / "async_io" / "async_io.so").touch()
    os.close(deepspeed_.lock_operators(tmp_path))
    assert [path.name for path in (tmp_path / "async_io").iterdir()] == ["async_io.so"]
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)


def test_a_system_whose_package_is_missing_is_a_row_that_names_the_package(monkeypatch):
    monkeypatch.setitem(runner._PACKAGES, "deepspeed_", "no_such_package")
    results = interleave([System("DeepSpeed", "deepspeed_")], _TINY, rounds=2, disk=None)
    assert results.failed_rows() == [
        {"system": "DeepSpeed", "failed": "not run: pip install no_such_package"}
    ]
    assert results.failures == {}, "a missing package is not a failure"


def test_a_curve_leaves_out_points_that_failed(tmp_path):
    def run(speed):
        return {"tokens_per_s": speed, "peak_rss_bytes": 2**30, "first_step_s": 1.0, "last_loss": 2.0}

    full = Results({curves.PLAIN.name: [run(2.0)], "Headwater, memory": [run(3.0)]})
    failed = Results({"Headwater, memory": [run(3.0)]}, {curves.PLAIN.name: "no memory"})
    rows = curves.rows_of({512.0: full, 1024.0: failed})
    assert [row["ratio"] for row in rows if row["system"] == "Headwater, memory"] == [1.5, "–"]
    assert [row["failed"] for row in rows if "failed" in row] == ["no memory"]
    for label in ("tokens per step", "parameters"):
        curves.draw(rows, label, tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_points_of_curves():
    places = [point.place for point in curves.token_points("bf16", 32768)]
    assert places == [512 * 2**power for power in range(7)]
    assert [point.place for point in curves.token_points("bf16", 32768, quick=True)] == places[::2]
    sizes = [point.place for point in curves.size_points("bf16", 1.3e9)]
    assert sizes[0] == 10e6 and sizes[-1] == 1.3e9
    quick = curves.size_points("bf16", 774e6, quick=True)
    assert [point.place for point in quick] == sizes[:-1]
    assert {point.workload.tokens_per_step for point in quick} == {512}


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("Traceback:\n  File\nModuleNotFoundError: No module named 'mpi4py'\n", "No module named 'mpi4py'"),
        (
            "[rank0]: ValueError: too few\n[W123] destroy_process_group was not called\n",
            "ValueError: too few",
        ),
        ("headwater.core.errors.DoesNotFitError: no plan\n  remedy: more\n", "DoesNotFitError: no plan"),
        ("usage: x\nx: error: unrecognized arguments: --y\n", "unrecognized arguments: --y"),
        ("", "exit code -11"),
    ],
)
def test_reason_is_the_last_error_of_the_output(printed, reason):
    assert reason in reason_of(printed, -11)


def test_ratios_are_of_the_base_in_the_same_round():
    def run(speed):
        return {"tokens_per_s": speed, "peak_rss_bytes": 2**30, "first_step_s": 1.0, "last_loss": 2.0}

    runs = {"base": [run(1.0), run(4.0), run(2.0)], "other": [run(2.0), run(2.0), run(6.0)]}
    assert [row["ratio"] for row in table(runs, "base")] == [1.0, 2.0]
    assert [row["ratio"] for row in table(runs, "a base that failed")] == ["–", "–"]


def test_a_machine_without_measured_rates_has_a_row_without_predicted_time():
    plan = {"predicted_host_bytes": 2**30, "predicted_step_s": None}
    result = {"plan": plan, "peak_rss_bytes": 2**31, "step_s": 3.0}
    row = plan_truth.row_of("small", result)
    assert (row["memory_ratio"], row["predicted_s"], row["time_ratio"]) == (0.5, "", "")
    plan["predicted_step_s"] = 1.5
    assert plan_truth.row_of("small", result)["time_ratio"] == 0.5


def test_a_folder_that_does_not_exist_is_made(tmp_path):
    missing = tmp_path / "disk" / "of the tier"
    # The run starts, and fails because its module does not exist.
    with pytest.raises(runner.FailedRunError, match="no_such_system"):
        runner.run(System("none", "no_such_system"), _TINY, missing)
    assert missing.is_dir()


@pytest.mark.parametrize(
    ("module", "words", "error"),
    [
        ("large", ["--shapes", "111M,13B"], "found '13B'; did you mean '1.3B'"),
        ("large", ["--memory", "much"], "expected a size in bytes, got 'much'"),
        ("tiers", ["--shares", "0.5", "2"], "expected a number from 0 to 1, found '2'"),
        ("ranks", ["--rounds", "0"], "expected a whole number of at least 1, found '0'"),
        ("speed", ["--layers", "-1"], "expected a whole number of at least 1, found '-1'"),
        ("hosts", ["--hosts", "1"], "expected a whole number of at least 2, found '1'"),
        ("architectures.__main__", ["--plans", "memory,dsk"], "found 'dsk'; did you mean 'disk'"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(module, words, error, capsys):
    with pytest.raises(SystemExit):
        parser_of(f"benchmarks.{module}").parse_args(words)
    assert error in capsys.readouterr().err


def test_names_and_files_that_do_not_exist_are_refused(tmp_path, capsys):
    parser = memory.make_parser()
    assert options.matching(parser, "--only", ["DISK"], ["in memory", "on disk"]) == ["on disk"]
    (tmp_path / "a.txt").touch()
    options.require_files(parser, "--books", tmp_path, "*.txt")
    for refused, error in [
        (lambda: options.matching(parser, "--only", ["tape"], ["in memory", "on disk"]), "contains 'tape'"),
        (lambda: options.require_files(parser, "--books", tmp_path, "*.txt", "*.gz"), "has no *.gz"),
        (lambda: options.require_files(parser, "--books", tmp_path / "b", "*.txt"), "expected a folder"),
        (lambda: options.require_place(parser, "--page", tmp_path / "b" / "page.md"), "a folder that exists"),
    ]:
        with pytest.raises(SystemExit):
            refused()
        assert error in capsys.readouterr().err


def test_a_shape_that_fails_is_a_row_and_the_next_one_has_no_ratio(monkeypatch, capsys):
    saved = {}

    def fail(system, workload, folder):
        raise FailedRunError(system.name, "", "no memory")

    monkeypatch.setattr(large, "run", fail)
    monkeypatch.setattr(large, "save", lambda name, rows, part: saved.update({name: rows}))
    monkeypatch.setattr(sys, "argv", ["large"])
    assert large.main() == 1
    assert saved["large"] == [{"model": name, "failed": "no memory"} for name in ("111M", "1.3B")]
    plan = dict.fromkeys(("tier", "activations", "micro_batch_size", "predicted_step_s"), None)
    plan |= {"activations": [], "flops_per_step": 1e9, "predicted_host_bytes": 0}
    result = {"plan": plan, "step_s": 2.0, "peak_rss_bytes": 0, "first_loss": 2.0, "last_loss": 1.0}
    assert large.row_of("1.3B", result, None)["of_first"] == "–"
    assert large.row_of("1.3B", result, {**result, "step_s": 1.0})["of_first"] == 0.5


def test_ratios_of_ranks_are_those_of_each_round():
    def runs(*speeds):
        return [{"tokens_per_s": speed} for speed in speeds]

    assert ranks.ratio("tokens_per_s", runs(4.0, 9.0, 8.0), runs(1.0, 3.0, 4.0), 2) == 1.5
    assert ranks.ratio("tokens_per_s", runs(4.0), []) == "–"


@pytest.mark.real_start
def test_a_program_that_gets_sigterm_removes_its_files(tmp_path):
    script = (
        "import tempfile, time\n"
        "from benchmarks.options import end_on_sigterm\n"
        "end_on_sigterm()\n"
        f"with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert len([*tmp_path.iterdir()]) == 1
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert [*tmp_path.iterdir()] == []


def measured_memory(system, workload, folder):
    return {"peak_rss_bytes": workload.layers * 2**30, "parameters": workload.layers * 10**6}


def test_a_part_of_a_benchmark_leaves_the_results_of_a_whole_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(memory, "run", measured_memory)
    for words in ([], ["--only", "Headwater"]):
        monkeypatch.setattr(sys, "argv", ["memory", *words])
        assert memory.main() == 0
    said = capsys.readouterr().out
    rows = {path.name: len(json.loads(path.read_text())["results"]["rows"]) for path in tmp_path.iterdir()}
    assert rows.keys() == {"memory.json", "memory_part.json"}
    assert 0 < rows["memory_part.json"] < rows["memory.json"]
    assert f"memory.json is left as it is\n{tmp_path / 'memory_part.json'}" in said


@pytest.mark.parametrize("module", PROGRAMS)
def test_options_that_make_a_run_a_part_exist(module):
    text = Path(importlib.util.find_spec(module).origin).read_text()
    for listed in re.findall(r"is_part\(parser, args, (.*?)\)", text):
        for option in re.findall(r'"(\w+)"', listed):
            assert f"--{option}" in parser_of(module).format_help()


def test_a_params_file_without_a_model_is_read_with_the_model_of_the_command_line(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("trainer: {init: {model: {hidden_size: 8}}}")
    assert params_files.problem_of(file, None) == "the key 'name' of the model is missing"
    assert str(params_files.problem_of(file, "gpt2")).startswith("--model gpt2: ")
