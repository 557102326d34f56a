"""Records in CSV files, and records that are too long."""

import gzip
import json
import tracemalloc

import pytest

from headwater.core.errors import DataError
from headwater.data import raw_records
from headwater.data.prepare import prepare
from headwater.data.raw_records import BadRecords, Record, read_records, text_of
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE, _short_words


def records(path, *, skip=False):
    bad = BadRecords(skip)
    return [record.fields for record in read_records([path], bad)], bad.count


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_csv(tmp_path, suffix):
    content = '\ufefftext,label\r\n"a ""quoted"", text\nof two lines",1\r\n\r\nžluť,\n'.encode()
    path = tmp_path / f"input{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    expected = [{"text": 'a "quoted", text\nof two lines', "label": "1"}, {"text": "žluť", "label": ""}]
    assert records(path) == (expected, 0)


@pytest.mark.parametrize(
    ("content", "what", "line"),
    [
        (b"text,text\na,b\n", "expected a different name for each column", 1),
        (b"text,\na,b\n", "expected a different name for each column", 1),
        (b"text,label\na,b\nc\n", "expected 2 fields, got 1", 3),
        (b'text\n"a', "file is not CSV: unexpected end of data", 2),
        (b'text\n"a" b\n', "file is not CSV", 2),
        (b"text\n\xff\n", "line is not UTF-8", 2),
    ],
)
def test_invalid_csv_is_refused(tmp_path, content, what, line):
    path = tmp_path / "input.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what) as raised:
        records(path)
    assert raised.value.where == f"{path}, line {line}"


def test_rows_of_another_length_can_be_skipped(tmp_path):
    path = tmp_path / "input.csv"
    path.write_text("text,label\na,b\nc\nd,e,f\ng,h\n")
    assert records(path, skip=True) == ([{"text": "a", "label": "b"}, {"text": "g", "label": "h"}], 2)


def test_data_are_prepared_from_csv(tmp_path):
    path = tmp_path / "input.csv"
    path.write_text("id,text\n" + "".join(f'{number},"a text, number {number}"\n' for number in range(40)))
    made = prepare([path], tmp_path / "out", PrepareSettings(TrainBPE(300), 8))
    assert made.documents == 40


@pytest.fixture
def short(monkeypatch):
    """Limit records to one MiB."""
    monkeypatch.setattr(raw_records, "MAX_RECORD_BYTES", 1 << 20)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_too_long_lines_are_refused_or_skipped_in_little_memory(tmp_path, short, kind):
    path = tmp_path / f"bomb.{kind}.gz"
    first, last = ("text\n", "end\n") if kind == "csv" else ("", json.dumps({"text": "end"}))
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(first)
        for _ in range(64):
            file.write("x" * (1 << 20))
        file.write("\n" + last)
    with pytest.raises(DataError, match="line is longer than 1 MiB"):
        records(path)
    tracemalloc.start()
    assert records(path, skip=True) == ([{"text": "end"}], 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("content", ['[{"text": "%s"}]', "[ %s"])
def test_too_long_elements_of_a_list_are_refused(tmp_path, short, content):
    path = tmp_path / "bomb.json"
    path.write_text(content % ("x" * (4 << 20)))
    with pytest.raises(DataError, match="record is longer than 1 MiB"):
        records(path)


def test_long_words_are_cut_to_train_a_tokenizer():
    """The training time is quadratic in the length of a word."""
    numbers = []
    for text in ("ab" * 5000, "1" * 300, "-" * 300, "中文" * 300, " " * 300, "x" * 64 + " y"):
        parts = list(_short_words(text))
        assert "".join(parts) == text and all(len(part) <= 64 + 2 for part in parts)
        numbers.append(len(parts))
    assert numbers == [157, 5, 5, 10, 5, 1]


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        (
            {"messages": []},
            "write --mode chat, which reads records like this one; or name the key of the text",
        ),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "write --mode preference"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "write --mode prompt_completion"),
        ({"content": "A text."}, "name the key of the text with --json_key; the record has 'content'"),
    ],
)
def test_a_record_of_another_mode_leads_to_that_mode(fields, advice):
    with pytest.raises(DataError, match="record has no key 'text'") as caught:
        text_of(Record(fields, "chats.jsonl, line 1", 0), "text")
    assert caught.value.remedy.startswith(advice)
