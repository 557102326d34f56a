"""The example that makes a chat model of a text: its data, and a shortened run from text to report."""

import gzip
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.data.assets import sample_text

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "nano_chat"


@pytest.fixture
def pairs(monkeypatch):
    """The module of the example that makes data."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("pairs")
    sys.modules.pop("pairs")


@pytest.fixture(scope="module")
def text():
    return gzip.decompress(sample_text().read_bytes()).decode()


def test_data_are_made_of_the_text_and_always_the_same(pairs, text):
    found = pairs.sentences(text)
    whole = " ".join(text.split())
    assert len(found) > 2000 and all(sentence in whole for sentence in found)
    talks = pairs.conversations(found, 1)
    assert talks == pairs.conversations(found, 1) != pairs.conversations(found, 2)
    answers = [talk["messages"][1]["content"] for talk in talks]
    assert all(answer in whole for answer in answers)


def test_better_answers_have_the_word_and_worse_ones_do_not(pairs, text):
    records = pairs.preferences(pairs.sentences(text), 1)
    assert len(records) > 500
    for record in records:
        (message,), (chosen,), (rejected,) = (record[key] for key in ("prompt", "chosen", "rejected"))
        word = re.fullmatch(r"Write a sentence with the word (\w+)\.", message["content"])[1]
        assert pairs.mentions(chosen["content"], word)
        assert not pairs.mentions(rejected["content"], word)


def test_no_data_ask_for_the_words_of_the_evaluation(pairs, text):
    found = pairs.sentences(text)
    tested = pairs.held_out(found)
    messages = {talk["messages"][0]["content"] for talk in pairs.conversations(found, 1)}
    messages |= {record["prompt"][0]["content"] for record in pairs.preferences(found, 1)}
    assert len(tested) > 50 and not messages & {pairs.MENTION.format(word) for word in tested}


@pytest.mark.pictures
def test_short_run_from_text_to_report_continues(text, tmp_path):
    """Two steps of each stage; the second call has nothing left to train."""
    (tmp_path / "book.txt").write_text(text[:120_000])
    words = ["--text", str(tmp_path / "book.txt"), "--folder", str(tmp_path / "run")]
    words += ["--steps", "2", "2", "2", "--questions", "1"]
    command = [sys.executable, str(FOLDER / "nano_chat.py"), *words]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "other.txt").write_text(text[:1000])
    command[command.index("--text") + 1] = str(tmp_path / "other.txt")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "book.txt" in done.stderr and "--folder" in done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "Write a sentence with the word" in page
    assert len(re.findall(r"<td>\d\.\d{3}", page)) == 3
    assert "http" not in page
    for stage in ("pretrain", "instruct", "prefer"):
        assert (tmp_path / "run" / stage / "checkpoint_2").exists()
        assert (tmp_path / "run" / stage / "history.jsonl").read_text().count('"train"') == 2
