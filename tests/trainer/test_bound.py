"""The line at the end of a run names what limited it, and the setting that would help most."""

import dataclasses
import logging

import pytest
from test_callbacks import PLAN, step

from headwater.plan.step_trace import PhaseCost, StageCost, Trace
from headwater.plan.types import Activations, Prediction, Resources
from headwater.trainer.bound import BoundSummary, best_advice, summary
from headwater.trainer.callback import FitStart

ON_DISK = dataclasses.replace(
    PLAN,
    tier="disk",
    budget=Resources(host_memory=1 << 30),
    prediction=Prediction(0, 1 << 30, 3 << 30, None, {}, {}),
)


def recomputing(policy):
    cost = StageCost(PhaseCost(100), PhaseCost(200), saved_bytes=1 << 30)
    trace = Trace((), (), (cost,), {}, 1)
    return dataclasses.replace(PLAN, trace=trace, activations=(policy,))


def test_the_largest_share_is_the_bound():
    line = summary({"compute": 7.0, "disk": 2.5, "memory": 0.01}, 10.0, PLAN)
    assert line == "bound by compute: compute 70%, disk 25% of the time"


def test_memory_that_would_hold_the_disk_tier_is_advised():
    line = summary({"compute": 5.0, "disk": 4.0}, 10.0, ON_DISK)
    assert line.endswith(
        "; host_memory: 4.00 GiB would keep all weights in memory and save the waits for the disk"
    )


def test_no_setting_is_advised_if_it_saves_no_time():
    assert best_advice({"compute": 1.0}, PLAN) is None
    assert best_advice({"compute": 0.97, "disk": 0.03}, ON_DISK) is None
    assert best_advice({"compute": 1.0}, recomputing(Activations.KEEP)) is None


def test_memory_for_recomputed_activations_is_advised():
    advice = best_advice({"compute": 1.0}, recomputing(Activations.RECOMPUTE))
    assert advice.share == pytest.approx(100 / 400)
    assert advice.text.startswith("1.00 GiB more host_memory would keep the activations")


def test_more_workers_are_advised_where_data_are_slow():
    assert "num_workers" in best_advice({"compute": 0.4, "input": 0.6}, PLAN).text


def test_a_run_logs_the_line_once_at_its_end(caplog):
    callback = BoundSummary()
    callback.on_fit_start(FitStart(0, 3, PLAN))
    for number in (1, 2, 3):
        callback.on_step_end(dataclasses.replace(step(number), bound_s={"compute": 0.4, "link": 0.05}))
    with caplog.at_level(logging.INFO):
        callback.on_fit_end()
    assert caplog.messages == ["bound by compute: compute 80%, link 10% of the time"]


def test_a_run_of_two_steps_has_no_line(caplog):
    callback = BoundSummary()
    callback.on_fit_start(FitStart(0, 2, PLAN))
    for number in (1, 2):
        callback.on_step_end(dataclasses.replace(step(number), bound_s={"compute": 0.4}))
    with caplog.at_level(logging.INFO):
        callback.on_fit_end()
    assert not caplog.messages
