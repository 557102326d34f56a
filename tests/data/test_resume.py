"""A killed preparation continues where it stopped, and writes byte-identical files."""

import filecmp
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.core.errors import DataError
from headwater.data import examples, packing
from headwater.data.modes import ModeOptions
from headwater.data.prepare import prepare
from headwater.data.tokenizer import TrainBPE

SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from headwater.data import journal, packing
from headwater.data.modes import ModeOptions
from headwater.data.prepare import prepare
from headwater.data.tokenizer import TrainBPE

if __name__ == "__main__":
    source, out, mode, workers, slow = sys.argv[1:]
    packing._TASK_CHARS, journal._INTERVAL_S = 2000, 0.0
    if slow == "first":
        add = journal.Corpus.add
        journal.Corpus.add = lambda corpus, block: (add(corpus, block), time.sleep(0.05))[0]
    elif slow == "second":
        import headwater.data.prepare as prepared
        mapped = prepared.ordered_map
        def slow_map(work, tasks, workers):
            for result in mapped(work, tasks, workers):
                time.sleep(0.05)
                yield result
        prepared.ordered_map = slow_map
    settings = dict(tokenizer=TrainBPE(300), sequence_length=32, samples_per_file=40, mode=mode)
    prepare([Path(source)], Path(out), **settings, num_workers=int(workers))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    record = {"prompt": "word " * 5, "completion": "other words " * 3}
    lines = (json.dumps({**record, "text": f"{n} {n * n} is a square. " * 6}) + "\n" for n in range(900))
    path.write_text("".join(lines))
    return path


def start(tmp_path, source, out, mode, workers, slow):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, script, source, tmp_path / out, mode, str(workers), slow]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def files_below(folder: Path):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("mode", "workers", "stage"),
    [
        ("pretraining", 1, "first"),
        ("pretraining", 2, "second"),
        ("prompt_completion", 2, "first"),
        ("fill_in_the_middle", 1, "second"),
    ],
)
def test_killed_preparation_continues_and_writes_the_same_bytes(tmp_path, source, mode, workers, stage):
    whole = start(tmp_path, source, "whole", mode, 1, "")
    killed = start(tmp_path, source, "out", mode, workers, stage)
    partial = tmp_path / "out.partial"
    signs = {"first": "journal.json", "second": "train/data-00001.h5"}
    deadline = time.monotonic() + 60
    while not (partial / signs[stage]).exists():
        assert killed.poll() is None, killed.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert whole.wait() == 0, whole.stderr.read()
    whole.communicate()
    done = json.loads((partial / "journal.json").read_text())["tasks"]
    assert done > 0
    kept = {path: path.stat().st_mtime_ns for path in partial.rglob("train/*.h5")}
    again = start(tmp_path, source, "out", mode, 1, "")
    assert again.wait() == 0, again.stderr.read()
    again.communicate()
    names = files_below(tmp_path / "whole")
    assert names == files_below(tmp_path / "out")
    assert filecmp.cmpfiles(tmp_path / "whole", tmp_path / "out", names, shallow=False) == (names, [], [])
    for path, time_ns in kept.items():
        assert (tmp_path / "out" / path.relative_to(partial)).stat().st_mtime_ns == time_ns, "not made again"


def test_finished_tasks_are_skipped(tmp_path, source, monkeypatch):
    """An interruption keeps the folder; the next run starts after the last saved task."""
    monkeypatch.setattr(packing, "_TASK_CHARS", 2000)
    monkeypatch.setattr("headwater.data.journal._INTERVAL_S", 0.0)
    settings = {"tokenizer": TrainBPE(300), "sequence_length": 32, "mode": "prompt_completion"}
    make, numbers = examples.MakeExamples.__call__, []

    def interrupted(self, task):
        numbers.append(task[0])
        if len(numbers) == 10:
            raise KeyboardInterrupt
        return make(self, task)

    monkeypatch.setattr(examples.MakeExamples, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", **settings)
    prepare([source], tmp_path / "out", **settings)
    assert numbers[:11] == [*range(10), 9]
    assert numbers[11:] == list(range(10, numbers[-1] + 1))


def test_other_settings_or_inputs_start_again(tmp_path, source):
    partial = tmp_path / "out.partial"
    settings = {"tokenizer": TrainBPE(300), "sequence_length": 32, "mode": "prompt_completion"}
    partial.mkdir()
    (partial / "tokenizer.json").write_text("not read")
    (partial / ".key").write_text("of something else")
    assert prepare([source], tmp_path / "out", **settings).train_samples == 855
    with pytest.raises(DataError, match="no field 'question'"):
        prepare([source], tmp_path / "b", **settings, options=ModeOptions(keys=(("prompt", "question"),)))
    assert not (tmp_path / "b.partial").exists()
