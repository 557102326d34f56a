"""RateProfiler, FlopUtilization and SavePerformanceData report the speed of a run, as in the Model Zoo."""

import dataclasses
import io
import json
import logging

import pytest
from rich.console import Console
from test_callbacks import PLAN, step

from headwater.config import load_params, shipped_params
from headwater.plan.step_trace import PhaseCost, StageCost, Trace
from headwater.trainer.callback import FitStart
from headwater.trainer.history import History, read_history
from headwater.trainer.logs import make_callbacks
from headwater.trainer.progress import ProgressBar
from headwater.trainer.rates import FlopUtilization, PerformanceFile, RateProfiler
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tensorboard import TensorBoard

COST = StageCost(PhaseCost(100), PhaseCost(200))
WITH_FLOPS = dataclasses.replace(PLAN, trace=Trace((), (), (COST, COST), {}, 1), num_micro_batches=4)

OLDER = """
train_input: {data_processor: GptHDF5MapDataProcessor, data_dir: data, batch_size: 4}
model: {name: gpt2, vocab_size: 50, hidden_size: 32, num_hidden_layers: 2, num_heads: 2, filter_size: 64,
        max_position_embeddings: 8}
optimizer: {optimizer_type: AdamW, learning_rate: 0.1}
runconfig: {max_steps: 10}
"""


def timed(number, samples, seconds):
    return dataclasses.replace(step(number), samples=samples, tokens=0, step_s=seconds)


def test_rates_are_those_of_all_steps_and_of_the_latest_ones():
    meter = RateProfiler()
    assert meter.totals() == {}
    first = meter.measure(timed(1, 8, 2.0))
    assert first == {"local_samples_per_sec": 4, "avg_samples_per_sec": 4, "avg_steps_per_sec": 0.5}
    second = meter.measure(timed(2, 8, 0.5))
    assert second["local_samples_per_sec"] == pytest.approx(0.4 * 16 + 0.6 * 4)
    assert second["avg_samples_per_sec"] == pytest.approx(16 / 2.5)
    assert second["avg_steps_per_sec"] == pytest.approx(2 / 2.5)
    assert meter.totals() == {
        "total_samples": 16,
        "total_time": 2.5,
        "rate": second["local_samples_per_sec"],
        "global_rate": 16 / 2.5,
        "samples_per_sec": 16 / 2.5,
    }


def test_texts_have_a_rate_of_tokens():
    meter = RateProfiler()
    first = meter.measure(dataclasses.replace(timed(1, 8, 2.0), tokens=128))
    assert (first["local_tokens_per_sec"], first["avg_tokens_per_sec"]) == (64, 64)
    second = meter.measure(dataclasses.replace(timed(2, 8, 0.5), tokens=128))
    assert second["local_tokens_per_sec"] == pytest.approx(0.4 * 256 + 0.6 * 64)
    assert second["avg_tokens_per_sec"] == pytest.approx(256 / 2.5)


def test_utilization_counts_the_flops_of_all_micro_batches():
    meter = FlopUtilization(lambda plan: 4000.0)
    meter.on_fit_start(FitStart(0, 2, WITH_FLOPS))
    assert meter.totals() == {}
    # 4 micro-batches of 2 stages with 300 FLOPs each are 2,400 FLOPs.
    assert meter.measure(timed(1, 8, 1.0)) == {"flops_utilization": pytest.approx(60)}
    assert meter.measure(timed(2, 8, 3.0)) == {"flops_utilization": pytest.approx(30)}


def test_a_machine_that_was_not_measured_has_no_utilization(caplog):
    meter = FlopUtilization(lambda plan: None)
    with caplog.at_level(logging.WARNING):
        meter.on_fit_start(FitStart(0, 2, WITH_FLOPS))
    assert "FlopUtilization reports nothing: the speed of this machine was not measured" in caplog.text
    assert meter.measure(timed(1, 8, 1.0)) == {}


def made(tmp_path, callbacks):
    config = load_params(shipped_params()["gpt/tiny"], [f"trainer.init.callbacks={callbacks}"])
    assert not any("Profiler" in notice or "Flop" in notice for notice in config.notices)
    return [type(each) for each in make_callbacks(config.init, RunDir(tmp_path), None)]


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ("[{RateProfiler: {}}]", {RateProfiler}),
        ("[{RateProfiler: {}}, {FlopUtilization: {}}]", {RateProfiler, FlopUtilization}),
        ("[{FlopUtilization: {}}, {SavePerformanceData: {}}]", {FlopUtilization, PerformanceFile}),
        ("[{RateProfiler: null}]", set()),
        ("[{ComputeNorm: {}}]", set()),
    ],
)
def test_the_params_name_the_callbacks(tmp_path, callbacks, expected):
    kinds = {RateProfiler, FlopUtilization, PerformanceFile}
    assert kinds.intersection(made(tmp_path, callbacks)) == expected


def test_a_file_of_the_older_form_takes_the_callbacks_from_the_command_line(tmp_path):
    (tmp_path / "params.yaml").write_text(OLDER)
    config = load_params(tmp_path / "params.yaml", ["trainer.init.callbacks=[{RateProfiler: {}}]"])
    assert config.init.has_callback("RateProfiler")


def test_all_loggers_write_the_numbers(tmp_path):
    event = dataclasses.replace(step(1), metrics={"avg_samples_per_sec": 12.5, "flops_utilization": 34.0})
    console = Console(file=io.StringIO(), width=400)
    loggers = [History(tmp_path / "h.jsonl"), TensorBoard(tmp_path), ProgressBar(console)]
    for logger in loggers:
        logger.on_fit_start(FitStart(0, 1, PLAN))
        logger.on_step_end(event)
        logger.on_fit_end()
    assert next(read_history(tmp_path / "h.jsonl"))["metrics"] == dict(event.metrics)
    assert "avg_samples_per_sec 12.5  flops_utilization 34" in console.file.getvalue()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [scalar.value for scalar in events.Scalars("avg_samples_per_sec")] == [12.5]


def test_performance_data_are_those_of_all_meters(tmp_path, caplog):
    rates, flops = RateProfiler(), FlopUtilization(lambda plan: 4000.0)
    flops.on_fit_start(FitStart(0, 1, WITH_FLOPS))
    for meter in (rates, flops):
        meter.measure(timed(1, 8, 1.0))
    PerformanceFile(tmp_path / "performance.json", [rates, flops]).on_fit_end()
    found = json.loads((tmp_path / "performance.json").read_text())
    assert found == {**rates.totals(), **flops.totals()}
    with caplog.at_level(logging.WARNING):
        PerformanceFile(tmp_path / "nothing" / "performance.json", [rates]).on_fit_end()
    assert "performance.json was not written; the training is not affected" in caplog.text


def test_a_run_without_steps_keeps_the_performance_data_of_the_previous_run(tmp_path):
    path = tmp_path / "performance.json"
    path.write_text('{"rate": 4}')
    PerformanceFile(path, [RateProfiler()]).on_fit_end()
    assert path.read_text() == '{"rate": 4}'


def test_performance_data_without_meters_are_a_warning(tmp_path, caplog):
    file = PerformanceFile(tmp_path / "performance.json", [])
    with caplog.at_level(logging.WARNING):
        file.on_fit_start(FitStart(0, 1, PLAN))
    assert "SavePerformanceData writes nothing: expected RateProfiler or FlopUtilization" in caplog.text
    file.on_fit_end()
    assert not (tmp_path / "performance.json").exists()
