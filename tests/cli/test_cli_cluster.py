"""`headwater plan --cluster`: tables, plots, a trace, numbers, and invalid options."""

import json
from itertools import pairwise

import pytest
import yaml

from headwater.cli.cluster import NUMBERS_FILE, SCALING_FILE, TIMELINE_FILE, TRACE_FILE

TINY = ("plan", "gpt/tiny", "--batch_size", 16)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    from headwater.cli.main import main

    folder = tmp_path_factory.mktemp("cluster") / "new" / "folder"
    words = (*TINY, "--cluster", "two_cores", "--counts", "4,1,8", "--out", folder)
    assert main([str(word) for word in words]) == 0
    return folder


def test_a_row_for_each_number(headwater):
    code, text, _ = headwater(*TINY, "--cluster", "8xh100", "--counts", "1,4")
    assert code == 0
    assert "strong scaling" in text
    rows = [line.split() for line in text.splitlines() if line.split() and line.split()[0] in ("1", "4")]
    assert [row[0] for row in rows] == ["1", "4"] * 2  # one table of speed, one of parts
    assert rows[0][-1] == "100.0%"


def test_default_counts_are_powers_of_two_up_to_the_batch_size(headwater):
    _, text, _ = headwater(*TINY, "--cluster", "two_cores")
    assert "16 CSXs" not in text
    assert "32 CSXs: a batch of 16 cannot be divided among 32 CSXs" in text
    assert "1024 CSXs" in text


def test_counts_that_do_not_divide_the_batch_are_skipped(headwater):
    code, text, err = headwater(*TINY, "--cluster", "8xh100", "--counts", "1,3,8")
    assert code == 0
    assert "3 CSXs are left out: a batch of 16 cannot be divided among 3 CSXs" in err
    rows = [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0].isdigit()]
    assert {"1", "8"} <= set(rows)


def test_weak_scaling_keeps_the_batch_size_per_csx(headwater):
    _, text, _ = headwater(*TINY, "--cluster", "two_cores", "--counts", "32", "--scaling", "weak")
    assert " 512 " in text


def test_the_simulator_writes_plots(out):
    for name in (SCALING_FILE, TIMELINE_FILE):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_the_trace_has_the_chrome_format(out):
    trace = json.loads((out / TRACE_FILE).read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"host"}
    rows = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 <= event["ts"]
            assert event["cat"] in ("compute", "broadcast", "reduce", "update", "disk", "offload")
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert set(rows) <= set(names)
    assert {"rank 0", "rank 1", "memory", "network out", "network in"} <= {names[row] for row in rows}
    for row in rows.values():
        row.sort()
        assert all(start >= before + lasted - 1e-3 for (before, lasted), (start, _) in pairwise(row))


def test_the_simulator_writes_its_numbers(out):
    numbers = json.loads((out / NUMBERS_FILE).read_text())
    assert [point["num_csx"] for point in numbers["points"]] == [1, 4, 8]
    assert numbers["cluster"] == "two_cores"
    trace = json.loads((out / TRACE_FILE).read_text())
    for point in numbers["points"]:
        assert sum(point["parts_s"].values()) == pytest.approx(point["step_s"])
        assert point["samples_per_s"] == pytest.approx(16 / point["step_s"])
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) / 1e6 == pytest.approx(numbers["points"][-1]["step_s"], rel=5e-2)


def test_a_file_of_this_machine_agrees_with_its_plan(headwater, tmp_path):
    file, folder = tmp_path / "here.yaml", tmp_path / "out"
    code, text, _ = headwater(*TINY, "--write_cluster", file)
    assert code == 0
    number, unit = next(line.split()[1:] for line in text.splitlines() if line.startswith("step "))
    predicted = float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    headwater(*TINY, "--cluster", file, "--counts", "1", "--out", folder)
    (point,) = json.loads((folder / NUMBERS_FILE).read_text())["points"]
    assert point["step_s"] == pytest.approx(predicted, rel=0.02)  # printed with three digits

    code, text, err = headwater(*TINY, "--write_cluster", file)
    assert code == 2
    assert "File exists" in err
    assert text == ""  # the error comes before the plan
    code, text, err = headwater(*TINY, "--write_cluster", tmp_path / "missing" / "here.yaml")
    assert code == 2 and "No such file or directory" in err and text == ""

    wider = yaml.safe_load(file.read_text()) | {
        "hosts": 4,
        "network": {"bytes_per_s": 1e8, "latency_s": 1e-4},
    }
    file.write_text(yaml.safe_dump(wider))
    code, text, _ = headwater(*TINY, "--cluster", file)
    assert code == 0
    assert "broadcast" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cluster", "nowhere"), "there is no cluster file 'nowhere'"),
        (("--counts", "2"), "--counts needs --cluster"),
        (("--out", "x"), "--out needs --cluster"),
        (("--scaling", "weak"), "--scaling needs --cluster"),
        (("--cluster", "cs2", "--scaling", "none"), "got 'none'"),
        (("--cluster", "cs2", "--counts", "1,two"), "expected numbers separated by commas, got '1,two'"),
        (("--cluster", "cs2", "--counts", "0"), "expected numbers separated by commas, got '0'"),
        (("--cluster", "cs2", "--counts", "193"), "expected num_csx to be 1 to 192 (CSXs of cs2), got 193"),
        (("--cluster", "cs2", "--counts", "3"), "a batch of 16 cannot be divided among 3 CSXs"),
        (("--cluster", "8xh100", "--counts", "12"), "a batch of 16 cannot be divided among 12 CSXs"),
        (("--cluster", "cs2", "--num_csx", "2"), "write --counts instead"),
        (("--cluster", "cs2", "--png", "x.png"), "--png applies to this machine"),
        (("--cluster", "cs2", "--recalibrate"), "--recalibrate applies to this machine"),
        (("--cluster", "cs2", "--counts", "1", "--out", "/dev/null/x"), "the simulation cannot be written"),
    ],
)
def test_invalid_options_of_the_simulator(headwater, words, message):
    code, _, err = headwater(*TINY, *words)
    assert code == 2
    assert message in err


def test_a_model_that_no_number_of_csxs_can_train(headwater, tmp_path):
    file = tmp_path / "small.yaml"
    document = yaml.safe_load(
        """
        description: a very small box
        hosts: 1
        host:
          ranks: 1
          memory: {size: 600MiB, bytes_per_s: 1 GB/s, adamw_params_per_s: 1.0e+8}
          flops_per_s: {fp32: 1.0e+9, bf16: 1.0e+9, fp16: 1.0e+9}
          saved_bytes_per_s: {fp32: 1 GB/s, bf16: 1 GB/s, fp16: 1 GB/s}
        """
    )
    file.write_text(yaml.safe_dump(document))
    code, _, err = headwater("plan", "gpt/gpt2_small", "--batch_size", 1, "--cluster", file)
    assert code == 2
    assert "no number of CSXs can train this" in err
    assert "600 MiB of host memory" in err
