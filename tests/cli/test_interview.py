"""Questions to the user: from the command line, by default, and on a terminal."""

import io

import pytest

from headwater.cli.interview import Interview, Question
from headwater.core.errors import ConfigError


def count(text):
    if not text.isdigit():
        raise ConfigError(f"expected an integer, got {text!r}")
    return int(text)


QUESTION = Question("--count", "How many", "4", count)


def test_an_option_comes_before_the_default():
    assert Interview(takes_defaults=True).ask(QUESTION, "7") == 7
    assert Interview(takes_defaults=True).ask(QUESTION, None) == 4


def test_a_missing_option_without_a_terminal_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ConfigError, match="--count is missing"):
        Interview(takes_defaults=False).ask(QUESTION, None)


def test_a_wrong_answer_on_a_terminal_is_asked_again(monkeypatch, capsys):
    answers = iter(["many", "", "5"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    interview = Interview(takes_defaults=False)
    assert [interview.ask(QUESTION, None) for _ in range(2)] == [4, 5]
    assert "expected an integer, got 'many'" in capsys.readouterr().err
