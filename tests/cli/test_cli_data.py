"""The command `headwater data`: arguments, files and summary."""

import argparse
import gzip
import json

import pytest

from headwater.cli.data import add_arguments, run
from headwater.core.errors import ConfigError, DataError
from headwater.data.assets import sample_text
from headwater.data.statistics import read_statistics


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(gzip.decompress(sample_text().read_bytes())[:50_000])
    return path


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def test_shipped_text_is_prepared(tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--out", out, "--sequence_length", 128, "--vocab_size", 1024, "--num_workers", 1]
    assert run(parse(sample_text(), *options)) == 0
    statistics = read_statistics(out)
    assert (statistics.text_bytes, statistics.vocab_size) == (1_009_602, 1024)
    assert statistics.unigram_entropy == pytest.approx(5.9, abs=0.3)
    printed = capsys.readouterr().out
    for fact in (
        f"{statistics.tokens:,}",
        f"{statistics.unigram_entropy:.3f}",
        f"{statistics.train_samples:,}",
    ):
        assert fact in printed


def test_existing_tokenizer_is_used(text_file, tmp_path):
    first = ["--out", tmp_path / "a", "--vocab_size", 300, "--sequence_length", 16, "--num_workers", 1]
    run(parse(text_file, *first))
    again = [
        "--out",
        tmp_path / "b",
        "--tokenizer",
        tmp_path / "a",
        "--sequence_length",
        16,
        "--num_workers",
        1,
    ]
    run(parse(text_file, *again))
    old, new = (sorted((tmp_path / name / "train").iterdir()) for name in "ab")
    assert [path.read_bytes() for path in old] == [path.read_bytes() for path in new]
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_tokenizer_and_vocab_size_exclude_each_other(text_file, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(text_file, "--out", tmp_path / "out", "--vocab_size", 300, "--tokenizer", "x")
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "limit"), [(256, "at least 257"), (10**11, "at most 4,194,304")])
def test_the_size_of_a_vocabulary_has_limits(text_file, tmp_path, size, limit):
    with pytest.raises(ConfigError, match=f"expected vocab_size of {limit}"):
        run(parse(text_file, "--out", tmp_path / "out", "--vocab_size", size))


def test_error_names_the_input(tmp_path):
    with pytest.raises(DataError, match=r"(?s)does not exist.*nowhere\.txt"):
        run(parse(tmp_path / "nowhere.txt", "--out", tmp_path / "out"))


@pytest.mark.parametrize(("longer", "advice"), [("skip", ", or --longer cut"), ("cut", "\n")])
def test_advice_for_records_that_were_left_out(tmp_path, capsys, longer, advice):
    records = [{"prompt": "a", "completion": "b " * size} for size in (1, 1, 90)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = ["--vocab_size", 258, "--sequence_length", 16, "--num_workers", 1, "--longer", longer]
    mode = ["--mode", "prompt_completion"]
    assert run(parse(tmp_path / "answers.jsonl", "--out", tmp_path / "out", *mode, *options)) == 0
    error = capsys.readouterr().err
    assert "1 of 3 records were left out, because they do not fit into 16 tokens" in error
    assert f"write a larger --sequence_length{advice}" in error
