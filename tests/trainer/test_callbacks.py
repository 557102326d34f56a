"""The files of callbacks can be read by other libraries."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from headwater.core.precision import Precision
from headwater.plan.step_trace import Trace
from headwater.plan.types import Plan, Resources
from headwater.trainer.callback import FitStart, StepEnd, ValidateEnd
from headwater.trainer.history import History, read_history
from headwater.trainer.loss_curve import draw_loss_curve
from headwater.trainer.progress import ProgressBar
from headwater.trainer.tensorboard import TensorBoard

PLAN = Plan(
    trace=Trace((), (), (), {}, 1),
    precision=Precision(),
    device="cpu",
    tier="memory",
    in_place=True,
    slabs=1,
    activations=(),
    micro_batch_size=1,
    num_micro_batches=1,
    gradient_tier="memory",
    budget=Resources(host_memory=1 << 40),
)


def step(number, loss=1.0):
    return StepEnd(number, loss, 0.1, 2.0, True, 1.0, 1000, 0.5, 3 << 20, 1 << 20, 0.75, 0.0)


def run(callback, *steps, start=0, end=4):
    callback.on_fit_start(FitStart(start, end, PLAN))
    for event in steps:
        callback.on_step_end(event)
    callback.on_validate_end(ValidateEnd(steps[-1].step, 0, 0.5, 3))
    callback.on_fit_end()


def test_history_is_exact(tmp_path):
    loss = 0.1 + 0.2
    run(History(tmp_path / "h.jsonl"), step(1, loss))
    train, validate = read_history(tmp_path / "h.jsonl")
    assert train["loss"] == loss and validate["kind"] == "validate"


def test_history_drops_steps_after_the_last_checkpoint_of_a_killed_run(tmp_path):
    path = tmp_path / "h.jsonl"
    run(History(path), step(1), step(2), step(3, 9.0))
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 4, "lo')
    run(History(path), step(3), start=2)
    assert [(r["kind"], r["step"], r["loss"]) for r in read_history(path)] == [
        ("train", 1, 1.0), ("train", 2, 1.0), ("train", 3, 1.0), ("validate", 3, 0.5),
    ]  # fmt: skip


def test_history_of_a_new_run_replaces_that_of_an_old_one(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps({"kind": "validate", "step": 0, "loss": 7.0}) + "\n")
    run(History(path), step(1))
    assert [record["step"] for record in read_history(path)] == [1, 1]


def test_the_loss_curve_is_a_png_file(tmp_path):
    run(History(tmp_path / "h.jsonl"), step(1), step(2))
    draw_loss_curve(tmp_path / "h.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    draw_loss_curve(tmp_path / "none.jsonl", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_tensorboard_reads_the_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(TensorBoard(tmp_path, log_steps=2), *map(step, range(1, 5)))
    events = accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "train/tokens_per_s", "train/gradient_norm"} <= tags
    assert {"stream/bytes_in", "stream/slab_hit_rate"} <= tags
    evaluations = accumulator.EventAccumulator(str(tmp_path / "eval"))
    evaluations.Reload()
    assert set(evaluations.Tags()["scalars"]) == {"validate/loss"}
    assert [event.value for event in evaluations.Scalars("validate/loss")] == [0.5]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(2, 1.0), (4, 1.0)]
    assert events.Scalars("train/tokens_per_s")[0].value == 2000.0


def test_progress_is_printed_as_lines_without_a_terminal():
    console = Console(file=io.StringIO(), width=200)
    run(ProgressBar(console, log_steps=2), *map(step, range(1, 4)), end=3)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/3", "step 3/3", "step 3"]
    assert "loss 1.0000  2,000 tokens/s  streamed 4.00 MiB/step  memory" in lines[0]
    assert "/ 1.00 TiB" in lines[0]
    assert "validation loss 0.5000 (3 batches)" in lines[-1]


def test_progress_shows_the_loss_scale_where_it_is_asked_for():
    shown = []
    for asked in (False, True):
        console = Console(file=io.StringIO(), width=200)
        run(
            ProgressBar(console, log_loss_scale=asked),
            dataclasses.replace(step(1), loss_scale=65536.0),
            end=1,
        )
        shown.append("loss 1.0000  loss scale 65536  " in console.file.getvalue())
    assert shown == [False, True]


def test_progress_is_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    run(ProgressBar(console), step(1), step(2))
    output = console.file.getvalue()
    assert "\x1b[" in output and "2/4" in output
    assert output.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_lines_of_progress_end_with_the_time_that_is_left():
    text = io.StringIO()
    run(ProgressBar(Console(file=text, width=200)), *map(step, range(1, 5)))
    lines = [
        line.rstrip() for line in text.getvalue().splitlines() if line.startswith("step") and "/4" in line
    ]
    assert [line.rpartition("  ")[2] for line in lines[:3]] == ["1.50 s left", "1.00 s left", "500 ms left"]
    assert "left" not in lines[3]
