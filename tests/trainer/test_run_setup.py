"""Workloads, starting points and files that follow from the params."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from headwater.config import load_params, shipped_params
from headwater.core.attention import attention_kernel_available
from headwater.core.errors import CheckpointError, ConfigError, RunError
from headwater.core.precision import Precision
from headwater.core.warn_once import warn_once
from headwater.fabric.fabric import ALONE
from headwater.models.registry import build_model
from headwater.optim.loss_scale import LossScale
from headwater.plan import machine
from headwater.plan.cgroups import Level
from headwater.plan.machine import LATE_BYTES, resident_bytes, weight_bytes
from headwater.plan.report import render_plan
from headwater.plan.types import Activations
from headwater.trainer.callback import Callback
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.evaluate import evaluate
from headwater.trainer.interrupt import Interrupt
from headwater.trainer.job import Job
from headwater.trainer.loop import Trainer
from headwater.trainer.planning import (
    Workload,
    make_engine,
    optimizer_of,
    plan_run,
    training_workload,
)
from headwater.trainer.ranks import check_num_ranks
from headwater.trainer.run_dir import RunDir
from headwater.trainer.start import Start
from headwater.trainer.state import RunState
from headwater.trainer.zoo_job import zoo_trainable

SMALL = [
    "trainer.init.model.vocab_size=50",
    "trainer.init.model.hidden_size=32",
    "trainer.init.model.num_hidden_layers=2",
    "trainer.init.model.num_heads=2",
    "trainer.init.model.max_position_embeddings=8",
    "trainer.init.backend.backend_type=CPU",
]


def tiny(*overrides):
    return load_params(shipped_params()["gpt/tiny"], [*SMALL, *overrides])


@pytest.mark.parametrize(
    ("overrides", "resumed", "expected"),
    [
        ([], None, None),
        ([], 4, 4),
        ([], 5, None),  # the batch is not a multiple of it any more
        (["micro_batch_size=2"], 4, 2),
        (["trainer.init.loop.grad_accum_steps=8"], None, 2),
        (["trainer.init.loop.grad_accum_steps=8", "micro_batch_size=2"], None, 2),
    ],
)
def test_micro_batch_size(overrides, resumed, expected):
    init = tiny(*overrides).init
    start = Start(state=RunState(0, LossScale.of(Precision()), resumed))
    assert training_workload(init, zoo_trainable(init), 16, start).micro_batch_size == expected


def test_micro_batch_sizes_that_contradict_each_other():
    init = tiny("trainer.init.loop.grad_accum_steps=4", "micro_batch_size=2").init
    with pytest.raises(ConfigError, match="micro_batch_size 2 × grad_accum_steps 4 is not batch_size"):
        training_workload(init, zoo_trainable(init), 16)


def test_plan_follows_the_params():
    config = tiny(
        "trainer.init.backend.num_slabs=2", "trainer.init.backend.activations=recompute", "host_memory=4GiB"
    )
    trainable = zoo_trainable(config.init)
    plan = plan_run(config.init, trainable, Workload(4, optimizer_of(config.init, trainable), 2))
    assert (plan.slabs, plan.in_place, plan.num_micro_batches) == (2, False, 2)
    assert Activations.RECOMPUTE in plan.activations
    assert plan.budget is not None and plan.budget.host_memory == 4 << 30


def test_weights_that_are_in_memory_already_count_once():
    init = tiny("trainer.init.model.vocab_size=40000", "trainer.init.model.hidden_size=512").init
    trainable = zoo_trainable(init)
    with_values = dataclasses.replace(trainable, model=build_model(init.model, seed=init.seed), initial=None)
    weights = weight_bytes(with_values.model)
    assert weights > 70 << 20
    plan = plan_run(init, with_values, Workload(4, optimizer_of(init, trainable), 2))
    # The process may have grown or shrunk by a few MiB after the plan was made.
    assert plan.prediction.host_parts["interpreter"] < resident_bytes() + LATE_BYTES - 0.8 * weights


def test_a_budget_beyond_the_machine_is_noted_even_if_a_control_group_lowers_it(monkeypatch, caplog):
    monkeypatch.setattr(machine, "memory_levels", lambda: [Level(8 << 30, 0, 0)])
    init = tiny("host_memory=4096GiB").init
    trainable = zoo_trainable(init)
    plan = plan_run(init, trainable, Workload(4, optimizer_of(init, trainable), 2))
    assert plan.budget is not None and plan.budget.host_memory < 8 << 30
    assert "host_memory is 4.00 TiB, but this machine has" in caplog.text


@pytest.mark.parametrize(("kernel", "wanted"), [("auto", attention_kernel_available()), ("torch", False)])
def test_the_key_attention_chooses_the_kernel_and_the_plan_reports_it(kernel, wanted):
    bf16 = ("trainer.init.precision.enabled=true", "trainer.init.precision.fp16_type=bfloat16")
    init = tiny(f"trainer.init.backend.attention={kernel}", *bf16).init
    trainable = zoo_trainable(init)
    plan = plan_run(init, trainable, Workload(4, optimizer_of(init, trainable), 2))
    assert any(cost.backward.kernel_attention_flops for cost in plan.trace.costs) == wanted
    assert any(cost.backward.attention_flops for cost in plan.trace.costs) != wanted
    console = Console(file=io.StringIO(), record=True)
    console.print(render_plan(plan))
    assert ("kernel of this package" in console.export_text()) == wanted


def test_a_number_of_ranks_other_than_num_csx_is_refused():
    with pytest.raises(ConfigError, match="num_csx=2, but 1 rank was started"):
        check_num_ranks(tiny("num_csx=2").init, ALONE)


def test_resolved_params_mean_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny(
        "trainer.init.loop.eval_frequency=null", "model_dir=here", "checkpoint_path=other/checkpoint_1"
    )
    run_dir = RunDir(tmp_path / "here")
    run_dir.path.mkdir()
    run_dir.write_params(config)
    monkeypatch.chdir("/")
    again = load_params(run_dir.params)
    assert again.init.model_copy(update={"model_dir": None}) == config.init.model_copy(
        update={"model_dir": None}
    )
    assert again.init.model_dir == tmp_path / "here"
    assert again.fit is not None and config.fit is not None
    assert again.fit.ckpt_path is None, "it goes on from its own checkpoints"
    assert again.fit.train_dataloader.data_dir == (tmp_path / "data/tiny/train",)
    run_dir.write_params(again)
    assert load_params(run_dir.params) == again


def test_run_state_round_trip():
    data = {"samples_consumed": 7, "num_samples": 9, "shuffle": True, "shuffle_seed": 1}
    state = RunState(5, LossScale(8.0, dynamic=True, good_steps=2), 4, 3, data)
    assert RunState.from_dict(state.to_dict(), where="here") == state
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
        RunState.from_dict({"steps": 3}, where="here")


def test_evaluation_weighs_batches_by_their_samples():
    config = tiny("micro_batch_size=2")
    model = build_model(config.init.model, seed=config.init.seed).eval()
    generator = torch.Generator().manual_seed(0)

    def batch(size):
        tokens = torch.randint(0, 50, (size, 8), generator=generator)
        return {"input_ids": tokens, "labels": tokens.roll(-1, 1), "attention_mask": torch.ones_like(tokens)}

    batches = [batch(4), batch(3)]
    work, meta = Workload(4, micro_batch_size=2), zoo_trainable(config.init)
    with make_engine(config.init, meta, plan_run(config.init, meta, work), work.optimizer) as engine:
        found = evaluate(engine, meta, batches)
        assert evaluate(engine, meta, batches, max_batches=1).batches == 1
        assert evaluate(engine, meta, batches, stop=lambda: True) is None
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert found.batches == 2
    assert found.loss == pytest.approx(model(whole).item(), rel=1e-6)


def test_engine_starts_from_the_models_own_initial_values():
    config = tiny()
    meta, work = zoo_trainable(config.init), Workload(2)
    expected = dict(build_model(config.init.model, seed=config.init.seed).named_parameters())
    with make_engine(config.init, meta, plan_run(config.init, meta, work), work.optimizer) as engine:
        masters = {name: value.clone() for name, value in engine.named_masters()}
    assert masters.keys() == expected.keys()
    for name, value in masters.items():
        assert torch.equal(value, expected[name]), name


class Noted(Callback):
    """A callback that notes its events; its start fails with `error`, its end of a failed run with `late`."""

    def __init__(self, error=None, late=None):
        self.events, self.error, self.late = [], error, late

    def on_fit_start(self, event):
        if self.error is not None:
            raise self.error
        self.events.append("start")

    def on_fit_error(self, error):
        self.events.append(str(error))
        if self.late is not None:
            raise self.late

    def on_fit_end(self):
        self.events.append("end")


def test_callbacks_that_have_started_end_if_the_start_of_another_fails(tmp_path):
    init = tiny().init
    job = Job(init, zoo_trainable(init), train=[], batch_size=1)
    work = training_workload(init, job.trainable, 1)
    callbacks = [Noted(late=RunError("no mail")), Noted(), Noted(RunError("no place for files")), Noted()]
    with make_engine(init, job.trainable, plan_run(init, job.trainable, work), work.optimizer) as engine:
        state = RunState(0, LossScale.of(engine.plan.precision))
        manager = CheckpointManager(tmp_path)
        trainer = Trainer(engine, job, state, checkpoints=manager, callbacks=callbacks)
        with pytest.raises(RunError, match="no place for files"):
            trainer.fit(Interrupt())
    ended = ["start", "no place for files", "end"]
    assert [callback.events for callback in callbacks] == [ended, ended, [], []]


def test_callbacks_get_the_error_of_a_last_checkpoint_that_was_lost(tmp_path, monkeypatch):
    init = tiny("trainer.init.loop.max_steps=1").init
    job = Job(init, zoo_trainable(init), train=[], batch_size=1)
    work = training_workload(init, job.trainable, 1)
    manager, callback = CheckpointManager(tmp_path), Noted()

    def wait():
        monkeypatch.undo()
        raise CheckpointError("the disk is full")

    with make_engine(init, job.trainable, plan_run(init, job.trainable, work), work.optimizer) as engine:
        state = RunState(1, LossScale.of(engine.plan.precision))
        trainer = Trainer(engine, job, state, checkpoints=manager, callbacks=[callback], saved_step=1)
        monkeypatch.setattr(manager, "wait", wait)
        with pytest.raises(CheckpointError, match="the disk is full"):
            trainer.fit(Interrupt())
    assert callback.events == ["start", "the disk is full", "end"]


def test_learning_rates_of_mup_reach_the_optimizer():
    config = tiny(
        "trainer.init.model.mup_base_hidden_size=16",
        "trainer.init.model.mup_base_filter_size=64",
        "trainer.init.model.hidden_size=32",
        "trainer.init.model.filter_size=128",
    )
    options = optimizer_of(config.init, zoo_trainable(config.init)).options(
        "blocks.0.ffn.input.weight", (128, 32), {"lr": 1.0}
    )
    assert options["lr"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        ([], []),
        (["host_memory=2GiB"], []),
        (["host_memory=8TiB"], ["host_memory is 8.00 TiB, but this machine has"]),
        (["device_memory=8TiB"], ["device_memory: without effect, because the CPU computes"]),
    ],
)
def test_a_budget_that_limits_nothing_gives_one_note_for_all_plans_of_a_run(overrides, notes, caplog):
    warn_once.cache_clear()
    config = tiny(*(f"trainer.init.backend.{each}" for each in overrides))
    for _ in range(2):
        plan_run(config.init, zoo_trainable(config.init), Workload(4))
    assert len(caplog.messages) == len(notes)
    assert all(map(str.startswith, caplog.messages, notes))
