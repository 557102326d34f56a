"""Questions to the user. Each can be answered on the terminal or by a command-line option."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.core.errors import ConfigError

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Question(Generic[Value]):
    """A question to the user.

    Attributes:
        option: command-line option that answers the question.
        text: text of the question.
        default: default answer, as the user would write it.
        parse: converts an answer to its value, or raises `ConfigError`.
    """

    option: str
    text: str
    default: str
    parse: Callable[[str], Value]


class Interview:
    """Asks questions: takes the answer from the command line, the terminal or the default."""

    def __init__(self, *, takes_defaults: bool) -> None:
        self._takes_defaults = takes_defaults
        self._asks = sys.stdin.isatty()

    def ask(self, question: Question[Value], given: str | None) -> Value:
        """Return the answer to a question.

        Args:
            question: the question.
            given: the answer on the command line, if there is one.

        Raises:
            ConfigError: if the answer on the command line is not valid, or it is missing and stdin is not a
                terminal.
        """
        if given is not None:
            return question.parse(given)
        if self._takes_defaults:
            return question.parse(question.default)
        if not self._asks:
            raise ConfigError(
                f"{question.option} is missing, and stdin is not a terminal on which to ask",
                where="command line",
                remedy=f"write {question.option} (default: {question.default}), or --yes for all defaults",
            )
        while True:
            answer = input(f"{question.text} [{question.default}]: ").strip()
            try:
                return question.parse(answer or question.default)
            except ConfigError as error:
                print(error, file=sys.stderr)
