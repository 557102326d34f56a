"""Argument parsers that raise the package's errors. This module does not import torch, which is slow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headwater.core.errors import ConfigError
from headwater.core.names import nearest

_NEGATIVE = re.compile(r"-\.?\d")


def value_name(action: argparse.Action) -> str:
    """Return the name of an option's value in a help text: N for an integer, X for another number."""
    if action.type is int:
        return "N"
    return "X" if action.type is float else action.dest.upper()


class _Formatter(argparse.HelpFormatter):
    """Help texts with short names of values."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return value_name(action)


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # not generic when it runs
    """Commands whose own help begins with the line that describes them in the list of commands."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser:
        text = kwargs.get("help")
        if text and text != argparse.SUPPRESS:
            kwargs.setdefault("description", f"{text[0].upper()}{text[1:]}.")
        made: argparse.ArgumentParser = super().add_parser(name, **kwargs)
        return made


def _path(word: str) -> Path:
    """Return a path. An empty word, as from an unset variable of a shell, would be the current folder."""
    if not word:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(word)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)
        self.register("action", "parsers", _Commands)
        self.register("type", Path, _path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but report an unknown option before a missing argument."""
        # A parser of commands does not know the options of each command.
        if self._subparsers is None:
            for word in args or ():
                option = word.partition("=")[0]
                if (
                    option.startswith("--")
                    and "." not in option
                    and option not in self._option_string_actions
                ):
                    raise self.unknown(word)
            args = None if args is None else self._joined(args)
        return super().parse_known_args(args, namespace)

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Return the words with `--option=value` for each value that begins with a minus and a digit.

        argparse would take `-5GiB` for another option, and would report that the value is missing. After the
        join, the check of the value reports what is expected.
        """
        joined: list[str] = []
        for word in words:
            action = self._option_string_actions.get(joined[-1]) if joined else None
            if action is not None and action.nargs is None and _NEGATIVE.match(word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the value of a word. An error says what was expected without the name of a Python type."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            expected = {int: "an integer", float: "a number"}.get(action.type)  # type: ignore[call-overload]
            if expected is None:
                raise
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise argparse.ArgumentError(
                None, f"expected {name} to be {expected}, got {arg_string!r}"
            ) from error

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", remedy=f"see {self.prog} --help")

    def unknown(self, word: str) -> ConfigError:
        """Return the error for an unknown argument."""
        option, equals, _ = word.partition("=")
        see = f"see {self.prog} --help"
        sets_keys = any(action.dest == "flags" for action in self._actions)
        if not option.startswith("-") and not (equals and sets_keys):
            return ConfigError(f"unexpected argument {word!r}", where="command line", remedy=see)
        remedy = suggestion(option, self._option_string_actions, see)
        if sets_keys:
            from headwater.config.keys import meant_key  # here, because it imports pydantic, which is slow

            options = (known.removeprefix("--") for known in self._option_string_actions)
            remedy = did_you_mean(meant_key(option.removeprefix("--"), options), see)
        kind = "option" if option.startswith("-") else "key"
        return ConfigError(f"unknown {kind} {option}", where="command line", remedy=remedy)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise if a value is not one of the action's choices; name the most similar choice."""
        choices = None if action.choices is None else [str(choice) for choice in action.choices]
        if choices is not None and isinstance(value, str) and value not in choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise ConfigError(
                f"expected {name} to be one of {', '.join(choices)}, got {value!r}",
                where="command line",
                remedy=suggestion(value, choices, f"see {self.prog} --help"),
            )
        super()._check_value(action, value)


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy for an unknown word.

    Args:
        word: the unknown word.
        known: the known words.
        otherwise: text that follows the suggestion, or stands alone if no known word is similar.
    """
    return did_you_mean(nearest(word, known), otherwise)


def did_you_mean(close: str | None, otherwise: str) -> str:
    """Return a remedy that names a similar word, if there is one, before the text `otherwise`."""
    return f"did you mean {close}? {otherwise}" if close else otherwise
