"""A killed preparation continues where it stopped, and writes byte-identical files."""

import dataclasses
import filecmp
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.core.errors import DataError
from headwater.data import examples, packing
from headwater.data.modes import ModeOptions
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE

SCRIPT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from headwater.data import journal, packing
from headwater.data.prepare import prepare
from headwater.data.settings import NearDuplicates, PrepareSettings
from headwater.data.tokenizer import TrainBPE

source, out, mode, workers, name, count = sys.argv[1:]
packing._TASK_CHARS, journal._INTERVAL_S = 2000, -1.0
renamed = 0

def kill_before_rename(event, arguments):
    global renamed
    if event == "os.rename" and Path(arguments[1]).name == name:
        renamed += 1
        if renamed == int(count):
            parent = multiprocessing.parent_process()
            os.kill(os.getpid() if parent is None else parent.pid, signal.SIGKILL)

sys.addaudithook(kill_before_rename)
if __name__ == "__main__":
    near = NearDuplicates(0.95) if mode.endswith("+near") else False
    mode = mode.removesuffix("+near")
    settings = PrepareSettings(TrainBPE(300), 32, samples_per_file=40, mode=mode, deduplicate=near)
    prepare([Path(source)], Path(out), settings, num_workers=int(workers))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "a.jsonl"
    record = {"prompt": "word " * 5, "completion": "other words " * 3}
    texts = (f"{n % 700} {(n % 700) ** 2} is a square. " * 6 for n in range(900))
    lines = (json.dumps({**record, "text": text}) + "\n" for text in texts)
    path.write_text("".join(lines))
    return path


def run(tmp_path, source, out, mode, *, workers=1, kill_at="", count=0):
    """Run a preparation in a process that is killed before the `count`-th rename of a file to `kill_at`.

    Return the exit code. Workers inherit stderr, so its end means that they have exited too.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, script, source, tmp_path / out, mode, str(workers), kill_at, str(count)]
    process = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


def files_below(folder: Path):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("mode", "workers", "kill_at", "count"),
    [
        ("pretraining", 1, "journal.json", 3),
        ("pretraining", 2, "data-00002.h5", 1),
        ("prompt_completion", 2, "journal.json", 3),
        ("fill_in_the_middle", 1, "data-00002.h5", 1),
        ("pretraining+near", 2, "journal.json", 3),
        ("prompt_completion+near", 1, "kept.npy", 1),
        ("pretraining+near", 2, "data-00002.h5", 1),
    ],
)
def test_killed_preparation_continues_and_writes_the_same_bytes(
    tmp_path, source, mode, workers, kill_at, count
):
    if "near" in mode:
        pytest.importorskip("datasketch")
    partial = tmp_path / "out.partial"
    assert run(tmp_path, source, "whole", mode) == 0
    assert run(tmp_path, source, "out", mode, workers=workers, kill_at=kill_at, count=count) != 0
    (journal,) = partial.rglob("journal.json")
    assert json.loads(journal.read_text())["tasks"] > 0
    assert (journal.parent == partial) == (kill_at.endswith(".h5") or "near" not in mode)
    kept = {path: path.stat().st_mtime_ns for path in partial.rglob("train/*.h5")}
    assert bool(kept) == kill_at.endswith(".h5")
    assert run(tmp_path, source, "out", mode) == 0
    names = files_below(tmp_path / "whole")
    assert names == files_below(tmp_path / "out")
    assert filecmp.cmpfiles(tmp_path / "whole", tmp_path / "out", names, shallow=False) == (names, [], [])
    for path, time_ns in kept.items():
        assert (tmp_path / "out" / path.relative_to(partial)).stat().st_mtime_ns == time_ns, "not made again"


def test_finished_tasks_are_skipped(tmp_path, source, monkeypatch):
    """An interruption keeps the folder; the next run starts after the last saved task."""
    monkeypatch.setattr(packing, "_TASK_CHARS", 2000)
    monkeypatch.setattr("headwater.data.journal._INTERVAL_S", -1.0)
    settings = PrepareSettings(TrainBPE(300), 32, mode="prompt_completion")
    make, numbers = examples.MakeExamples.__call__, []

    def interrupted(self, task):
        numbers.append(task[0])
        if len(numbers) == 10:
            raise KeyboardInterrupt
        return make(self, task)

    monkeypatch.setattr(examples.MakeExamples, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", settings)
    prepare([source], tmp_path / "out", settings)
    assert numbers[:11] == [*range(10), 9]
    assert numbers[11:] == list(range(10, numbers[-1] + 1))


def test_other_settings_or_inputs_start_again(tmp_path, source):
    partial = tmp_path / "out.partial"
    settings = PrepareSettings(TrainBPE(300), 32, mode="prompt_completion")
    other = dataclasses.replace(settings, options=ModeOptions(keys=(("prompt", "question"),)))
    partial.mkdir()
    (partial / "tokenizer.json").write_text("not read")
    (partial / ".key").write_text("of something else")
    assert prepare([source], tmp_path / "out", settings).train_samples == 855
    with pytest.raises(DataError, match="no field 'question'"):
        prepare([source], tmp_path / "b", other)
    assert not (tmp_path / "b.partial").exists()
