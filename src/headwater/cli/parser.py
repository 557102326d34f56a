"""Parsers whose errors are those of the package. Light: who lists jobs does not wait for torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

from headwater.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are those of the package."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, but an unknown option is refused before anything is said to be missing."""
        if self._subparsers is None:
            for word in args or ():
                option = word.partition("=")[0]
                if (
                    option.startswith("--")
                    and "." not in option
                    and option not in self._option_string_actions
                ):
                    raise self.unknown(word)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", remedy=f"see {self.prog} --help")

    def unknown(self, word: str) -> ConfigError:
        """The error for an argument that means nothing here."""
        option = word.partition("=")[0]
        if not option.startswith("-"):
            return ConfigError(
                f"unexpected argument {word!r}", where="command line", remedy=f"see {self.prog} --help"
            )
        return ConfigError(
            f"unknown option {option}",
            where="command line",
            remedy=suggestion(option, self._option_string_actions, f"see {self.prog} --help"),
        )


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """`write …` with the known word nearest to `word`, if one is near, and what else there is to do."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"write {close[0]}; {otherwise}" if close else otherwise
