"""Questions to the user, which the command line may answer too."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.core.errors import ConfigError

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Question(Generic[Value]):
    """One question.

    Attributes:
        option: of the command line that answers it.
        text: what the user reads.
        default: answer that counts where the user gives none, as the user would write it.
        parse: returns the value of an answer, or raises ConfigError.
    """

    option: str
    text: str
    default: str
    parse: Callable[[str], Value]


class Interview:
    """Gets answers: from the command line, from the terminal, or by default."""

    def __init__(self, *, takes_defaults: bool) -> None:
        self._takes_defaults = takes_defaults
        self._asks = sys.stdin.isatty()

    def ask(self, question: Question[Value], given: str | None) -> Value:
        """Return the answer to a question.

        Args:
            question: the question.
            given: the answer on the command line, if there is one.

        Raises:
            ConfigError: if the given answer is wrong, or if there is neither an answer nor a terminal.
        """
        if given is not None:
            return question.parse(given)
        if self._takes_defaults:
            return question.parse(question.default)
        if not self._asks:
            raise ConfigError(
                f"{question.option} is missing, and questions need a terminal",
                where="command line",
                remedy=f"give {question.option} (default: {question.default}), or take all defaults: --yes",
            )
        while True:
            answer = input(f"{question.text} [{question.default}]: ").strip()
            try:
                return question.parse(answer or question.default)
            except ConfigError as error:
                print(error, file=sys.stderr)
