"""Lists of jobs as text, and parsers whose errors are those of the package."""

import pytest

from headwater.cli.job_output import last_error, render_table, short_time, show_records
from headwater.cli.parser import Parser, suggestion
from headwater.core.errors import ConfigError


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (119.9, "119s"), (120, "2m"), (3 * 3600, "3h"), (48 * 3600 - 1, "47h"), (48 * 3600, "2d")],
)
def test_a_duration_has_a_unit_of_its_size(seconds, text):
    assert short_time(seconds) == text


def test_every_row_of_a_table_has_as_many_words():
    table = render_table([("NAME", "LABELS"), ("wsjob-1", ""), ("j", "a=b")])
    assert table.splitlines() == ["NAME      LABELS", "wsjob-1   -", "j         a=b"]


def test_records_are_written_in_both_formats():
    assert show_records({"name": "ü"}, "yaml") == "name: ü"
    assert show_records({"a": 1}, "json") == '{\n  "a": 1\n}'


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"", None),
        (b"job wsjob-000000000001 on csx-0, csx-1\n", None),
        (b"job wsjob-000000000001 on csx-0\nstep 1\n\nkilled\n\n", "killed"),
        (b"error: the disk is full\n  where: run\n  remedy: delete files\n", "error: the disk is full"),
        (b"error: an old one\n" + b"step\n" * 20, "step"),
        (b"\xc3\n" + b"x" * 2000, "x" * 333 + "\u2026" + "x" * 166),
    ],
)
def test_the_line_that_says_why_a_job_failed(log, line):
    assert last_error(log) == line


def test_an_unknown_option_is_reported_before_a_missing_one():
    parser = Parser(prog="headwater fit")
    parser.add_argument("--model_dir", required=True)
    with pytest.raises(ConfigError, match="unknown option --model_dirr") as refused:
        parser.parse_args(["--model_dirr", "x"])
    assert refused.value.remedy == "did you mean --model_dir? see headwater fit --help"
    with pytest.raises(ConfigError, match="--model_dir"):
        parser.parse_args([])


def test_a_suggestion_names_a_similar_word():
    assert suggestion("paln", ["plan", "fit"], "see help") == "did you mean plan? see help"
    assert suggestion("zebra", ["plan", "fit"], "see help") == "see help"
