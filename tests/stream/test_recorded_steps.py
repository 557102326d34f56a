"""The recorder has what each thread did in a step, and for which stage."""

import dataclasses
import itertools
import threading
import time

import pytest
import torch
from gpt_job import gpt_job
from harness import Setting, make_engine

import headwater
from headwater.core.busy import busy_times
from headwater.core.recorder import RECORDER


def recorded_step(setting, folder, **options):
    """Return the report, the stages and the events of the second step of a small GPT."""
    job = gpt_job(**options)
    with make_engine(job, setting, folder) as engine:
        engine.train_step(job.batches(0), job.update(0))
        begin = time.perf_counter_ns()
        report = engine.train_step(job.batches(1), job.update(1))
        events = RECORDER.events(begin, time.perf_counter_ns())
        return report, engine.plan.trace, events


def own(events):
    return [event for event in events if event.thread == threading.current_thread().name]


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


SETTINGS = [
    Setting(in_place=True),
    Setting(slabs=2),
    Setting(tier="disk"),
    Setting(tier="disk", gradient_tier="disk"),
    Setting(slabs=2, activations="recompute"),
    Setting(tier="disk", activations="offload"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_computing_thread_does_one_thing_at_a_time_and_always_something(setting, tmp_path):
    _, _, events = recorded_step(setting, tmp_path, micro_batches=2)
    mine = own(events)
    assert all(before.end == after.begin for before, after in itertools.pairwise(mine))
    whole_s = 1e-9 * (mine[-1].end - mine[0].begin)
    assert sum(times_of(events).bound_s.values()) <= whole_s * (1 + 1e-9)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_stages_compute_in_the_order_of_the_schedule(setting, tmp_path):
    _, trace, events = recorded_step(setting, tmp_path)
    computed = [event.stage for event in of_kind(own(events), "compute") if event.stage]
    names = [stage.name for stage in trace.stages]
    assert set(computed) == set(names)
    blocks = [name for name, _ in itertools.groupby(name for name in computed if ".h." in name)]
    expected = [name for name in names if ".h." in name]
    assert len(expected) == 4
    assert blocks == expected + expected[-2::-1]


def test_every_stage_is_fetched_and_updated_with_its_bytes(tmp_path):
    _, trace, events = recorded_step(Setting(tier="disk"), tmp_path)
    names = {stage.name for stage in trace.stages}
    bytes_of = {stage.name: stage.slab_bytes for stage in trace.stages}
    fetches = of_kind(events, "fetch")
    assert {event.stage for event in fetches} == names
    assert all(event.num_bytes in (0, bytes_of[event.stage]) for event in fetches)
    assert {event.stage for event in of_kind(events, "update")} == names
    for kind in ("disk read", "disk write"):
        assert {event.stage for event in of_kind(events, kind)} == names
        assert {event.thread.rpartition("_")[0] for event in of_kind(events, kind)} == {"headwater-disk"}
    assert not of_kind(own(events), "update")


def test_in_place_updates_run_on_the_computing_thread(tmp_path):
    _, trace, events = recorded_step(Setting(in_place=True), tmp_path)
    names = {stage.name for stage in trace.stages}
    assert {event.stage for event in of_kind(own(events), "update")} == names
    assert not of_kind(events, "fetch") and not of_kind(events, "wait")


def test_gradients_carry_their_stage_and_all_their_bytes(tmp_path):
    report, trace, events = recorded_step(Setting(), tmp_path)
    gradients = [event for event in of_kind(own(events), "gradient") if event.stage]
    assert {event.stage for event in gradients} == {stage.name for stage in trace.stages}
    assert sum(event.num_bytes for event in gradients) == report.statistics.bytes_out


def times_of(events):
    """Return the times of the whole range of this thread's events."""
    mine = own(events)
    return busy_times(events, mine[0].begin, mine[-1].end, threading.current_thread().name)


def test_the_events_of_a_step_have_the_seconds_of_each_kind(tmp_path):
    _, _, events = recorded_step(Setting(tier="disk"), tmp_path)
    times = times_of(events)
    kinds = {"compute", "wait", "fetch", "update", "gradient", "disk read", "disk write"}
    assert times.busy_s.keys() == kinds
    compute_s = 1e-9 * sum(event.end - event.begin for event in of_kind(own(events), "compute"))
    assert times.busy_s["compute"] == pytest.approx(compute_s, rel=0.01)


def test_a_step_that_fails_leaves_no_work_open(tmp_path):
    job = gpt_job()
    with make_engine(job, Setting(), tmp_path) as engine:
        with pytest.raises(RuntimeError):
            engine.train_step([torch.zeros(1, 1, 1, 1)], job.update(0))
        assert RECORDER.lane().work is None


class FailingBackward(torch.autograd.Function):
    fails = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailingBackward.fails:
            raise RuntimeError("backward fails")
        return gradient


def failing_loss(model, tokens):
    return FailingBackward.apply(model(input_ids=tokens, labels=tokens).loss)


def test_a_backward_that_fails_leaves_no_work_open(tmp_path, monkeypatch):
    job = dataclasses.replace(gpt_job(), loss=failing_loss)
    monkeypatch.setattr(FailingBackward, "fails", False)  # in the dry run
    engine = make_engine(job, Setting(), tmp_path)
    monkeypatch.setattr(FailingBackward, "fails", True)
    with engine, pytest.raises(RuntimeError, match="backward fails"):
        engine.train_step(job.batches(0), job.update(0))
    # After the end of the engine, which resets what the backward has left.
    assert RECORDER.lane().work is None


def test_a_loop_of_the_user_is_recorded_between_forward_and_backward():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model = headwater.compile(model, headwater.backend(num_slabs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.perf_counter_ns()
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        assert RECORDER.lane().work is None
        optimizer.step()
        optimizer.zero_grad()
    events = RECORDER.events(begin, time.perf_counter_ns())
    assert {"0", "1", "2"} <= {event.stage for event in of_kind(events, "compute")}
    first = model[0](torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="backward fails"):
        model[2](FailingBackward.apply(model[1](first))).sum().backward()
    model(torch.ones(2, 8))
    assert RECORDER.lane().work is None
    headwater.release(model)
