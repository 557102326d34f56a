"""A profile attributes the time of steps to modules, forward and backward, and changes no results."""

import dataclasses
import io
import itertools
import json
import logging
import re
import time
from collections import defaultdict

import pytest
import torch
from gpt_job import gpt_job, plain_gpt
from harness import History as Results
from harness import Setting, assert_equal, collect, make_engine, regression
from rich.console import Console
from torch import nn
from zoo_jobs import zoo_job

from headwater.core.errors import ConfigError, RunError
from headwater.core.recorder import RECORDER
from headwater.fabric.fabric import ALONE
from headwater.plan.types import Activations, Prediction
from headwater.profiler import operators
from headwater.profiler.chrome import LANES
from headwater.profiler.predicted import predicted_lanes
from headwater.profiler.ranks import report
from headwater.profiler.stages import stage_flops
from headwater.profiler.summary import document_of
from headwater.profiler.tables import module_table, stage_table
from headwater.profiler.taking import ProfiledSteps
from headwater.trainer.callback import FitStart, StepEnd
from headwater.trainer.op_profiler import OpProfiler, check_range
from read_only import another_user

SETTINGS = [
    Setting(in_place=True),
    Setting(tier="disk"),
    Setting(slabs=2, activations="recompute"),
]


def profiled(job, setting, folder, *, steps=3, only=(1,), results=None, **options):
    """Train, and return the profile of some steps."""
    with make_engine(job, setting, folder) as engine:
        taken = None
        for step in range(steps):
            if step == only[0]:
                taken = ProfiledSteps(engine.model, engine.plan, **options)
            begin = time.perf_counter_ns()
            report = engine.train_step(job.batches(step), job.update(step))
            end = time.perf_counter_ns()
            if step in only:
                taken.add_step(step, begin, end)
            if step == only[-1]:
                profile = taken.finish()
            if results is not None:
                results.losses.append(report.loss)
                results.norms.append(report.gradient_norm)
        if results is not None:
            collect(engine, results)
        return profile


def rows(profile):
    return {row.name: row for row in profile.summary.modules}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_profile_changes_no_results_and_its_shares_are_the_whole_step(setting, tmp_path):
    results = Results()
    profile = profiled(gpt_job(micro_batches=2), setting, tmp_path, results=results)
    assert_equal(results, plain_gpt(3, 2))
    found = rows(profile)
    for part in ("attn", "mlp", "ln_1"):
        for block in range(4):
            forward, backward = (found[f"model.transformer.h.{block}.{part}.{way}"] for way in ("fwd", "bwd"))
            assert forward.calls == backward.calls == 2
            assert forward.seconds > 0 and backward.seconds > 0
    entries = [*document_of(profile.summary)["modules"], *document_of(profile.summary)["others"]]
    assert sum(entry["share"] for entry in entries) == pytest.approx(1, abs=1e-6)
    assert all(entry["share"] >= 0 for entry in entries)


def test_layers_exist_only_while_a_profile_is_taken(tmp_path):
    job = gpt_job()
    with make_engine(job, Setting(), tmp_path) as engine:

        def around():
            return {
                path: len(getattr(vars(module).get("_call_impl"), "layers", ()))
                for path, module in engine.model.named_modules()
            }

        before = around()
        taken = ProfiledSteps(engine.model, engine.plan)
        assert around() != before
        taken.close()
        assert around() == before


class Slow(nn.Module):
    """A linear layer that sleeps in forward, and longer in backward."""

    FORWARD_S, BACKWARD_S = 0.1, 0.15
    sleep = staticmethod(time.sleep)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            Slow.sleep(Slow.FORWARD_S)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            Slow.sleep(Slow.BACKWARD_S)
            return gradient.clone()

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.Sleep.apply(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.slow = Slow()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.last(torch.tanh(self.slow(self.first(x) * 2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.layers(x)


@pytest.fixture
def only_sleep_takes_time(monkeypatch):
    """Count only the time in which `Slow` sleeps. A pause of a busy machine would be time of any module."""
    slept_ns, looks = [0], itertools.count()

    def sleep(seconds):
        slept_ns[0] += int(1e9 * seconds)

    monkeypatch.setattr(Slow, "sleep", sleep)
    for clock in ("time", "headwater.core.recorder", "headwater.profiler.modules"):
        # No two looks at the clock have the same time.
        monkeypatch.setattr(f"{clock}.perf_counter_ns", lambda: slept_ns[0] + next(looks))
    RECORDER._events.clear()  # events of the other clock
    yield
    RECORDER._events.clear()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_time_is_attributed_to_the_module_that_spends_it(activations, only_sleep_takes_time, tmp_path):
    again = Slow.FORWARD_S if activations == "recompute" else 0
    setting = Setting(slabs=2, activations=activations)
    profile = profiled(regression(Model, 2, 4), setting, tmp_path, steps=2)
    found = rows(profile)
    for block in range(2):
        name = f"model.layers.{block}.slow"
        assert found[f"{name}.fwd"].seconds == pytest.approx(Slow.FORWARD_S, abs=0.01)
        assert found[f"{name}.bwd"].seconds == pytest.approx(Slow.BACKWARD_S + again, abs=0.01)
    times_s = {row.name: row.seconds for row in profile.summary.modules}
    assert {name.split(".")[3] for name, seconds in times_s.items() if seconds > 0.01} == {"slow"}
    assert sum(times_s.values()) == pytest.approx(2 * (Slow.FORWARD_S + Slow.BACKWARD_S + again), abs=0.01)


def test_deeper_rows_are_taken_out_of_those_around_them(only_sleep_takes_time, tmp_path):
    shallow = rows(profiled(regression(Model, 2, 4), Setting(), tmp_path, steps=2, depth=0))
    assert {"model.layers.0.fwd", "model.layers.1.bwd", "model.fwd"} <= shallow.keys()
    assert shallow["model.layers.0.fwd"].seconds >= Slow.FORWARD_S
    assert shallow["model.layers.0.fwd"].flops > 0
    deep = rows(profiled(regression(Model, 2, 4), Setting(), tmp_path, steps=2, depth=2))
    assert deep["model.layers.0.slow.linear.fwd"].seconds < deep["model.layers.0.slow.fwd"].seconds


def test_the_table_lists_the_ten_most_expensive_rows_and_all_other_work(tmp_path):
    profile = profiled(gpt_job(), Setting(tier="disk"), tmp_path)
    text = io.StringIO()
    Console(file=text, width=140).print(module_table(profile.summary))
    lines = text.getvalue().splitlines()
    assert lines[1].split()[:3] == ["PyTorch", "module", "time,"]
    assert [line.split()[0] for line in lines[2:12]] == [str(number) for number in range(10)]
    assert lines[2].split()[1] == profile.summary.modules[0].name
    for name in ("other rows of modules", "wait for weights", "gradients to the store", "rest of the step"):
        assert name in text.getvalue()
    assert lines[-1].split()[-1] == "100.00"


def test_the_table_of_stages_lists_their_computation_updates_and_transfers(tmp_path):
    profile = profiled(gpt_job(micro_batches=2), Setting(tier="disk", activations="recompute"), tmp_path)
    summary = profile.summary
    assert [stage.name for stage in summary.stages] == [stage.name for stage in profile.plan.trace.stages]
    parts = {stage.name: stage for stage in profile.plan.trace.stages}
    for stage, cost in zip(summary.stages, profile.plan.trace.costs, strict=True):
        assert stage.forward_s > 0 and stage.backward_s > 0 and stage.update_s > 0
        # The weights come twice in a micro-batch or are still there, and go back to the disk once.
        assert stage.weight_bytes >= parts[stage.name].slab_bytes
        assert stage.disk_bytes >= 2 * parts[stage.name].slab_bytes
        assert stage.gradient_bytes > 0
        assert stage.flops >= 2 * (cost.forward.flops + cost.backward.flops)
    from_host = (Activations.RECOMPUTE_FROM_HOST,) * len(profile.plan.activations)
    recomputed = stage_flops(dataclasses.replace(profile.plan, activations=from_host), 1)
    for name, cost in zip(parts, profile.plan.trace.costs, strict=True):
        assert recomputed[name] == (2 * cost.forward.flops, 2 * (cost.backward.flops + cost.forward.flops))
    computed = sum(stage.compute_s for stage in summary.stages)
    assert computed <= sum(row.seconds for row in summary.modules) + 1e-9
    assert summary.busy.busy_s["wait"] == pytest.approx(sum(stage.wait_s for stage in summary.stages))
    assert sum(row.wait_s for row in summary.modules) <= summary.busy.busy_s["wait"] + 1e-9
    assert sum(row.wait_s for row in summary.modules) > 0
    text = io.StringIO()
    named = dataclasses.replace(summary.stages[0], name="position_embedding")
    Console(file=text, width=80).print(
        stage_table(dataclasses.replace(summary, stages=(named, *summary.stages[1:])))
    )
    assert "position_embedding" in text.getvalue()
    columns = ["stage", "forward", "backward", "wait", "update", "GFLOP/s", "weights", "gradients", "disk"]
    assert text.getvalue().splitlines()[1].split() == columns


def test_operators_are_listed_by_module(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "_MOST_MODULES", 1000)
    monkeypatch.setattr(operators, "_MOST_OPERATORS", 1000)
    profile = profiled(gpt_job(), Setting(in_place=True), tmp_path, operators=True)
    text, _, table = profile.operators.partition("\n\n")
    modules = {block.split()[0]: block for block in re.split(r"\n(?=\S)", text)}
    assert "aten::" in modules["model.transformer.h.0.attn.fwd"]
    embedding = {name for name, block in modules.items() if "aten::embedding " in block}
    assert embedding == {"model.transformer.wte.fwd", "model.transformer.wpe.fwd"}
    assert "Self CPU time total" in table


def run_callback(callback, job, setting, folder, *, steps, plan=lambda plan: plan):
    with make_engine(job, setting, folder) as engine:
        callback.on_fit_start(FitStart(0, steps, plan(engine.plan), engine.model))
        for step in range(1, steps + 1):
            start = time.perf_counter()
            report = engine.train_step(job.batches(step), job.update(step))
            step_s = time.perf_counter() - start
            callback.on_step_end(StepEnd(step, report.loss, 0.1, 1.0, True, 1.0, 0, step_s, 0, 0, 1.0, 0.0))
        callback.on_fit_end()


def with_prediction(plan):
    parts = {"update": 0.01, "compute": 0.1, "copy": 0.0, "disk": 0.05, "link": 0.0, "overlap": -0.02}
    return dataclasses.replace(plan, prediction=Prediction(0, 0, 0, 0.14, {}, parts))


def test_the_files_of_a_profile_can_be_read(tmp_path):
    folder = tmp_path / "profile"
    console = Console(file=io.StringIO(), width=140)
    callback = OpProfiler(2, 3, folder, console)
    run_callback(callback, gpt_job(), Setting(tier="disk"), tmp_path, steps=4, plan=with_prediction)
    assert "Time of steps 2 to 3" in console.file.getvalue()
    found = json.loads((folder / "op_profile.json").read_text())
    assert found["steps"] == [2, 3]
    assert found["prediction"]["compute"]["predicted_ms"] == pytest.approx(100)
    assert {"update", "compute", "disk", "step"} == found["prediction"].keys()
    assert all(entry["ratio"] > 0 for entry in found["prediction"].values())
    whole_ms = found["step_ms"]
    assert all(0 < entry["ms"] <= whole_ms for entry in found["all_threads"].values())
    assert found["all_threads"]["disk read"]["bytes"] > 0
    trace = json.loads((folder / "chrome_trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert set(LANES) <= set(lanes.values())
    ends = defaultdict(float)
    work = sorted((event for event in trace if event["ph"] == "X"), key=lambda event: event["ts"])
    for event in work:
        assert event["ts"] >= ends[event["tid"]] - 1e-3  # nothing overlaps in a lane
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert {"compute", "update", "fetch", "disk read", "disk write", "gradient"} <= {e["cat"] for e in work}
    assert any(event["name"] == "model.transformer.h.0.attn.bwd" for event in work)
    pytest.importorskip("matplotlib")
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_predicted_forward_of_tied_weights_is_drawn_once_in_total(tmp_path):
    with make_engine(gpt_job(), Setting(in_place=True), tmp_path) as engine:
        plan = with_prediction(engine.plan)
    uses, costs = plan.trace.uses, plan.trace.costs
    (tied,) = {stage for stage in uses if uses.count(stage) > 1}
    assert plan.num_micro_batches == 1
    drawn = defaultdict(float)
    bars = [bar for bar in predicted_lanes(plan)["compute"] if bar[2] == "forward"]
    for stage, (begin, end, _) in zip(uses, bars, strict=True):
        drawn[stage] += end - begin
    # 8 FLOPs a byte: see `predicted._work`.
    work = [each.forward.flops + 8 / 3 * (each.saved_bytes + each.transient_bytes) for each in costs]
    for stage in set(uses) - {tied}:
        assert drawn[tied] / drawn[stage] == pytest.approx(work[tied] / work[stage])


def test_a_run_that_ends_before_the_last_profiled_step_has_a_profile(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run_callback(OpProfiler(2, 9, tmp_path / "p"), regression(Model, 2, 4), Setting(), tmp_path, steps=2)
    assert "ends with the run at step 2, not at step 9" in caplog.text
    assert json.loads((tmp_path / "p" / "op_profile.json").read_text())["steps"] == [2]


def test_steps_that_the_run_does_not_have_are_an_error_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="between 1 and 4, the last step of the run, got 5 to 6"):
        run_callback(OpProfiler(5, 6, tmp_path / "p"), regression(Model, 2, 4), Setting(), tmp_path, steps=4)
    for start, end in ((3, 2), (0, 2)):
        with pytest.raises(ConfigError, match="expected 1 <= start_step <= end_step"):
            OpProfiler(start, end, tmp_path)


def test_a_range_that_begins_before_a_resumed_run_is_cut_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_range(3, 8, done=4, last=10)
    assert "the profile begins at step 5, not at step 3, which is done" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_range(1, 4, done=4, last=10)
    assert [record.getMessage() for record in caplog.records] == [
        "steps 1 to 4 are not profiled: step 4 is done"
    ]
    caplog.clear()
    check_range(1, 4, done=4, last=10, warn=False)
    check_range(5, 10, done=4, last=10)
    assert not caplog.records


def test_two_profiles_follow_each_other(tmp_path):
    first, second = OpProfiler(1, 1, tmp_path / "1"), OpProfiler(2, 3, tmp_path / "2")
    job = regression(Model, 2, 4)
    with make_engine(job, Setting(), tmp_path) as engine:
        for callback in (first, second):
            callback.on_fit_start(FitStart(0, 3, engine.plan, engine.model))
        for step in range(1, 4):
            report = engine.train_step(job.batches(step), job.update(step))
            for callback in (first, second):
                callback.on_step_end(StepEnd(step, report.loss, 0.1, 1.0, True, 1.0, 0, 0.1, 0, 0, 1.0, 0.0))
    steps = [json.loads((tmp_path / name / "op_profile.json").read_text())["steps"] for name in "12"]
    assert steps == [[1], [2, 3]]


def test_a_read_only_folder_is_an_error_before_the_run(protected):
    with another_user(), pytest.raises(RunError, match="found a read-only one"):
        OpProfiler(1, 1, protected / "p").on_fit_start(FitStart(0, 1, None))


def test_a_full_disk_is_a_warning_and_the_training_continues(tmp_path, caplog):
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "chrome_trace.json.partial").symlink_to("/dev/full")
    with caplog.at_level(logging.INFO):
        run_callback(OpProfiler(1, 1, folder), regression(Model, 2, 4), Setting(), tmp_path, steps=2)
    assert f"profile: {folder}" not in caplog.text
    assert "the training is not affected: no space left for chrome_trace.json" in caplog.text
    assert not (folder / "chrome_trace.json").exists()


def test_a_folder_that_is_a_file_is_an_error_before_the_run(tmp_path):
    (tmp_path / "p").write_text("")
    with pytest.raises(RunError, match="expected a folder or nothing, found a file"):
        run_callback(OpProfiler(1, 1, tmp_path / "p"), regression(Model, 2, 4), Setting(), tmp_path, steps=1)


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "q").write_text("")
    profile = profiled(regression(Model, 2, 4), Setting(), tmp_path, steps=2)
    with caplog.at_level(logging.WARNING):
        report(ALONE, profile, tmp_path / "q", None)
    assert "the profile was not written; the training is not affected" in caplog.text


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_shares_of_models_of_transformers_are_the_whole_step(name, setting, tmp_path):
    summary = profiled(zoo_job(name), setting, tmp_path, steps=2).summary
    found = document_of(summary)
    entries = [*found["modules"], *found["others"]]
    assert sum(entry["share"] for entry in entries) == pytest.approx(1, abs=0.03)
    assert all(entry["share"] >= 0 for entry in entries)
    ways = {entry["name"].rsplit(".", 1)[1] for entry in found["modules"]}
    assert ways == {"fwd", "bwd"}
    stages = {stage["name"]: stage for stage in found["stages"]}
    blocks = [stage for stage in stages.values() if stage.get("flops_per_s")]
    assert len(blocks) >= 2
    for stage in blocks:
        assert stage["forward_ms"] > 0
        assert stage["backward_ms"] > 0
        assert stage["update_ms"] > 0
        assert (stage["disk_bytes"] > 0) == (setting.tier == "disk")
