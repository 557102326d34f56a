"""Documents are cut into passages without losing a word."""

import gzip
import json
import os
from pathlib import Path

import pytest
from tokenizers import processors

from headwater.core.errors import DataError
from headwater.data.passages import (
    Passage,
    cut_passages,
    ended,
    first_tokens,
    halves,
    read_passages,
    titled,
)
from headwater.data.raw_records import BadRecords
from headwater.data.tokenizer import TrainBPE


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_passages_do_not_depend_on_the_blocks(size):
    text = " one two\tthree four\n\nfive  six seven "
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    assert list(cut_passages(blocks, 3)) == ["one two\tthree", "four\n\nfive  six", "seven"]
    assert list(cut_passages(blocks, 7)) == [text.strip()]


def test_a_long_word_is_cut_where_a_text_has_no_spaces():
    parts = list(cut_passages(["河" * 100, "流" * 100], 2))
    assert [len(part) for part in parts] == [64, 64, 64, 8]
    assert "".join(parts) == "河" * 100 + "流" * 100


def test_a_text_without_words_has_no_passages():
    assert list(cut_passages([" \n", "\t "], 5)) == []
    assert list(cut_passages([], 5)) == []


def test_passages_of_files_have_title_and_source(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    records = [{"text": "four five six", "title": "A  title"}, {"text": ""}, {"text": "seven", "title": None}]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"]
    assert list(read_passages(files, num_words=2)) == [
        Passage("one two", "", str(files[0])),
        Passage("three", "", str(files[0])),
        Passage("four five", "A title", f"{files[1]}, line 1"),
        Passage("six", "A title", f"{files[1]}, line 1"),
        Passage("seven", "", f"{files[1]}, line 3"),
    ]


def test_a_file_name_that_is_not_utf8_has_escapes(tmp_path):
    files = [Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/caf\xe9.txt", b"/\xe9.jsonl")]
    files[0].write_text("one")
    files[1].write_text('{"text": "two"}')
    sources = [passage.source for passage in read_passages(files)]
    assert sources == [rf"{tmp_path}/caf\xe9.txt", rf"{tmp_path}/\xe9.jsonl, line 1"]


def test_a_bad_record_is_an_error_or_is_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n{"text": "three", "title": 3}\n')
    with pytest.raises(DataError, match=r"(?s)no key 'text'.*line 2"):
        list(read_passages([path]))
    bad = BadRecords(skip=True)
    assert [each.text for each in read_passages([path], bad=bad)] == ["one"]
    assert bad.count == 2


def test_halves_are_cut_between_words():
    for text, expected in (
        ("one two three four", ("one two", "three four")),
        ("a longest-of-all-words", ("a", "longest-of-all-words")),
        ("oneword", ("one", "word")),
    ):
        assert tuple(each.text for each in halves(Passage(text, "t", "s"))) == expected


def test_a_title_is_the_first_of_a_pair_if_the_tokenizer_separates_pairs():
    trained = TrainBPE(300).train(["title text"])
    assert titled(trained, "title", "text", 64) == "title text"
    assert titled(trained, "", "text", 64) == "text" and titled(trained, "title", "", 64) == "title"
    trained.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    assert titled(trained, "title", "text", 64) == ("title", "text")


def test_a_title_has_at_most_half_of_the_tokens():
    tokenizer = TrainBPE(300).train(["title text"])
    for title in ("https://example.org/" + "a" * 150, "河" * 60, "é" * 60):
        whole = titled(tokenizer, title, "text", 24)
        kept = whole.removesuffix(" text")
        assert whole != kept and title.startswith(kept) and 0 < len(tokenizer.encode(kept).ids) <= 13
        assert titled(tokenizer, title, "text", 2) == "text"


def test_tokens_end_with_the_end_token():
    assert ended([1, 2], 3) == [1, 2, 3]
    assert ended([1, 3], 3) == [1, 3]
    assert ended([], 3) == [3]
    assert first_tokens([1, 2, 3], 3) == [1, 2, 3]
    assert first_tokens([1, 2, 4, 3], 3) == [1, 2, 3]
