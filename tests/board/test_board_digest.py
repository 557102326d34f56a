"""The digest of a run and the reader of its history, against all records of the run."""

import dataclasses
import json
import math
import os
import random
import threading

import numpy as np
import pytest

from headwater.board import reading
from headwater.board.board import Board
from headwater.board.digest import SERIES, Digest
from headwater.board.files import find_runs
from headwater.board.reading import HistoryReader
from headwater.trainer.callback import StepEnd
from headwater.trainer.history import StepNumbers, record_numbers, record_of, step_numbers

LOSS = SERIES.index("loss")


def line(step, loss=1.0, **changes):
    """The line that `History` writes for a step."""
    event = StepEnd(
        step, loss, 1e-3, 2.0, True, 1.0, 1000, 0.5, 3, 1, 0.75, 0.0, memory_bytes=1 << 30, samples=4
    )
    event = dataclasses.replace(
        event, busy_s={"compute": 0.1, "disk read": 0.2}, metrics={"auc": 0.5}, **changes
    )
    return json.dumps({"kind": "train", **dataclasses.asdict(event)}) + "\n"


def read_all(reader):
    while reader.advance(1 << 16):
        pass


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 5000])
@pytest.mark.parametrize("points", [1, 10, 400])
def test_a_digest_keeps_the_extremes_of_any_number_of_steps(count, points):
    draw = np.random.default_rng(count)
    steps = np.sort(draw.choice(np.arange(1, 3 * count + 1), count, replace=False))
    values = draw.normal(size=(len(SERIES), count))
    digest = Digest(64)
    for part in np.array_split(np.arange(count), 5):
        digest.add(steps[part], values[:, part])
    bands = digest.bands(points)
    assert 0 < len(bands.steps) <= points
    assert np.all(np.diff(bands.steps) > 0) and bands.steps[-1] == steps[-1]
    # Each bucket has exactly the extremes of the steps after the bucket before.
    edges = np.searchsorted(steps, bands.steps, side="right")
    for place, (begin, end) in enumerate(zip([0, *edges], edges, strict=False)):
        assert np.array_equal(bands.low[:, place], values[:, begin:end].min(axis=1))
        assert np.array_equal(bands.high[:, place], values[:, begin:end].max(axis=1))


def test_values_that_are_not_finite_are_left_out():
    digest = Digest()
    values = np.array([[1.0, math.nan, math.inf]] * len(SERIES))
    digest.add(np.array([1, 2, 3]), values)
    bands = digest.bands(100)
    assert bands.steps.tolist() == [1, 2, 3]
    assert np.array_equal(bands.high[LOSS], [1.0, math.nan, math.nan], equal_nan=True)


def test_adding_steps_twice_changes_nothing():
    once, twice = Digest(8), Digest(8)
    steps, values = np.arange(1, 100), np.random.default_rng(0).normal(size=(len(SERIES), 99))
    once.add(steps, values)
    twice.add(steps[::7], values[:, ::7])
    twice.add(steps, values)
    for one, other in zip(once.bands(5).__dict__.values(), twice.bands(5).__dict__.values(), strict=True):
        assert np.array_equal(one, other)


def test_the_fast_reading_of_a_line_equals_the_reading_as_json():
    draw = random.Random(0)
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-320, 1e308]
    for step in range(1, 300):
        numbers = [draw.choice([draw.gauss(0, 1) * 10 ** draw.randint(-20, 20), *special]) for _ in range(3)]
        text = line(
            step, numbers[0], gradient_norm=numbers[1], step_s=numbers[2], tokens=draw.randint(0, 1 << 40)
        )
        fast = step_numbers(text.encode())
        assert isinstance(fast, StepNumbers)
        assert repr(fast) == repr(record_numbers(record_of(text.encode())))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{}\n",
        line(1)[:-1],
        line(1)[:-9] + "\n",
        line(1).replace("train", "validate"),
        "\0" * 500 + "\n",
    ],
)
def test_the_fast_reading_refuses_other_lines(text):
    assert step_numbers(text.encode()) is None


def test_histories_of_earlier_versions_are_read():
    record = json.loads(line(3))
    for name in ("memory_bytes", "samples", "busy_s", "bound_s", "metrics"):
        del record[name]
    assert record_numbers(record) == StepNumbers(3, 1.0, 1e-3, 2.0, 0.5, 0, 1000, 0)


def test_a_reader_follows_a_history_and_reads_no_line_twice(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(map(line, range(1, 2001))) + '{"kind": "tra')
    reader = HistoryReader(path)
    read_all(reader)
    assert reader.steps[-1].step == 2000 and not reader.damaged
    with path.open("a") as file:
        file.write('in", "step": 2001, "loss": 9}\n' + line(2002, 7.0))
    assert reader.advance(1 << 20) and not reader.advance(1 << 20)
    assert reader.steps[-1].step == 2002 and reader.read_share == 1
    assert reader.damaged == 1  # the line that was completed has too few numbers
    assert reader.digest.bands(1).high[LOSS].tolist() == [7.0]


def test_a_spike_of_one_step_is_seen_among_a_hundred_thousand(tmp_path):
    path = tmp_path / "history.jsonl"
    text = line(1)
    with path.open("w") as file:
        for step in range(1, 100_001):
            file.write(
                text.replace('"step": 1,', f'"step": {step},', 1) if step != 54_321 else line(step, 99.0)
            )
    reader = HistoryReader(path)
    reader.sample(100)
    assert len(reader.digest.bands(400).steps) > 50
    read_all(reader)
    bands = reader.digest.bands(400)
    assert bands.high[LOSS].max() == 99.0 and len(bands.steps) > 300


def test_a_reader_begins_again_if_the_history_was_replaced(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(line(step, 5.0) for step in range(1, 101)))
    reader = HistoryReader(path)
    read_all(reader)
    # As a run that resumes from step 50: other numbers after it, and in the end the same length.
    path.write_text(
        "".join(line(step, 5.0 if step <= 50 else 3.0) for step in range(1, 101)) + line(101, 3.0)
    )
    read_all(reader)
    assert reader.steps[-1].step == 101
    assert reader.digest.bands(2).low[LOSS].tolist() == [3.0, 3.0]
    path.write_text(line(1, 8.0))
    read_all(reader)
    assert [step.loss for step in reader.steps] == [8.0]


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    path = tmp_path / "history.jsonl"
    lines = [
        line(1),
        "\0" * 700 + "\n",
        '{"kind": "train", "step": 2}\n',
        "[1, 2]\n",
        line(3),
        "é" * 9 + "\n",
        line(4, tokens=10**400),
        line(5, memory_bytes=10**400),
    ]
    path.write_bytes("".join(lines).encode())
    reader = HistoryReader(path)
    read_all(reader)
    assert [step.step for step in reader.steps] == [1, 3] and reader.damaged == 6


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"x" * (5 << 20) + b"\n" + line(1).encode())
    reader = HistoryReader(path)
    read_all(reader)
    assert [step.step for step in reader.steps] == [1] and reader.damaged


def test_evaluations_are_kept(tmp_path):
    path = tmp_path / "history.jsonl"
    found = {
        "kind": "validate",
        "step": 5,
        "loader": 0,
        "loss": 2.5,
        "batches": 3,
        "metrics": {"accuracy": 0.5},
    }
    path.write_text(line(5) + json.dumps(found) + "\n")
    reader = HistoryReader(path)
    read_all(reader)
    assert list(reader.validations) == [found]


def test_a_cut_last_line_does_not_keep_the_board_busy(tmp_path):
    (tmp_path / "history.jsonl").write_text(line(1) + line(2)[:40])
    board = Board(tmp_path)
    while board.refresh():
        pass
    (row,) = board.document()["runs"]
    assert row["step"] == 1 and 0.8 < row["read_share"] < 1


def test_a_sample_has_the_newest_steps_until_reading_reaches_them(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(line(step) for step in range(1, 2001)) + line(2001)[:40])
    reader = HistoryReader(path)
    reader.sample(10)
    assert [step.step for step in reader.steps] == list(range(1981, 2001))
    assert reader.advance(1 << 16) and reader.read_share < 1 and reader.steps[-1].step == 2000
    with path.open("a") as file:
        file.write(line(2001)[40:] + line(2002))
    read_all(reader)
    assert [step.step for step in reader.steps] == list(range(1983, 2003)) and not reader.damaged


def test_a_sample_has_lines_of_any_length(tmp_path):
    path = tmp_path / "history.jsonl"
    long = [line(n).replace("auc", "a" * 5 * n) for n in range(1, 1001)]
    path.write_text("".join(long))
    reader = HistoryReader(path)
    reader.sample(200)
    bands = reader.digest.bands(2000)
    assert len(bands.steps) > 50 and bands.steps[-1] == 1000


def test_requests_are_answered_while_a_history_is_parsed(tmp_path, monkeypatch):
    (tmp_path / "history.jsonl").write_text(line(1))
    board, documents = Board(tmp_path), []

    def parse(lines):
        documents.append((board.document(), board.curves(["."], 10), board.details(".")))
        return reading_parse(lines)

    reading_parse = reading.parse
    monkeypatch.setattr(reading, "parse", parse)
    # In another thread: with a lock that is held, this test would never end.
    thread = threading.Thread(target=board.refresh, daemon=True)
    thread.start()
    thread.join(200)
    assert not thread.is_alive() and len(documents) == 1
    assert board.document()["runs"][0]["step"] == 1


def test_runs_may_have_the_names_of_parts_of_runs_and_pipes_are_not_read(tmp_path):
    for name in ("train", "eval", "run", "run/train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.jsonl").write_text(line(1))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "history.jsonl")
    assert list(find_runs(tmp_path)) == ["eval", "run", "train"]
