"""`headwater fit` reports its speed and profiles all ranks; an evaluation warns that it does neither."""

import json
import os
from collections import defaultdict

import pytest
from run_samples import history, model_dir

SPEED = "--trainer.init.callbacks=[{RateProfiler: {}}, {FlopUtilization: {}}, {SavePerformanceData: {}}]"


def test_a_run_reports_its_speed_and_an_evaluation_warns(headwater, params, tmp_path):
    code, output, error = headwater("fit", params, SPEED)
    assert code == 0, output + error
    records = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    seconds = sum(record["step_s"] for record in steps)
    samples = sum(record["samples"] for record in steps)
    last = steps[-1]["metrics"]
    assert last["avg_samples_per_sec"] == pytest.approx(samples / seconds)
    assert last["avg_steps_per_sec"] == pytest.approx(len(steps) / seconds)
    assert "avg_samples_per_sec" in output
    performance = json.loads((tmp_path / "run/performance.json").read_text())
    assert performance["total_samples"] == samples
    assert performance["samples_per_sec"] == pytest.approx(last["avg_samples_per_sec"])
    # A machine that is too busy to be measured has no utilization, and says so.
    if "FlopUtilization reports nothing" not in error:
        assert 0 < performance["flops_utilization"] == last["flops_utilization"]
    code, output, error = headwater("validate", params, SPEED)
    assert code == 0
    assert "RateProfiler, FlopUtilization, SavePerformanceData: without effect here" in error


def test_a_profile_after_the_end_of_the_run_is_refused_before_planning(headwater, params, tmp_path):
    code, _, error = headwater("fit", params, "--profile=70:90", "--max_steps=4")
    assert code == 2
    assert "between 1 and 4, the last step of the run, got 70 to 90" in error
    assert not (tmp_path / "run/plan.txt").exists()  # written after planning


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_a_profile_has_all_ranks_and_changes_no_results(headwater, params, two, tmp_path):
    folder = tmp_path / "profiled"
    code = headwater("fit", params, "--num_csx=2", "--profile", "2:3", model_dir(folder))[0]
    assert code == 0
    assert history(folder) == history(two)
    found = json.loads((folder / "profile/op_profile.json").read_text())
    assert [(each["rank"], each["steps"]) for each in found["ranks"]] == [(0, [2, 3]), (1, [2, 3])]
    for each in found["ranks"]:
        assert sum(row["share"] for row in each["modules"] + each["others"]) == pytest.approx(1)
        assert any(row["name"].endswith(".bwd") for row in each["modules"])
    trace = json.loads((folder / "profile/chrome_trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    spans = defaultdict(list)
    for event in trace:
        if event["ph"] == "X" and event["cat"] == "compute":
            spans[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    # On one clock the ranks compute at the same time.
    begins = [min(begin for begin, _ in spans[rank]) for rank in names]
    ends = [max(end for _, end in spans[rank]) for rank in names]
    assert max(begins) < min(ends)
