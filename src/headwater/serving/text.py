"""Text of tokens that arrive one at a time, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

_CONTEXT = 8
"""Tokens of the prompt that are decoded with the first new ones: some tokenizers drop a leading space."""
UNFINISHED = "\ufffd"
"""The character that decoders put where the bytes of a character are not complete."""


@final
class TextStream:
    """Decodes generated tokens. Text is held back while it may be the beginning of a stop string.

    Args:
        decode: returns the text of tokens.
        prompt: the tokens before the generated ones.
        stops: strings that end the text. They are not part of it.

    Attributes:
        stopped: true after a stop string has ended the text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.stopped = False
        self._decode = decode
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0
        self._decoded = len(self._tokens)
        self._held = ""

    def add(self, token: int) -> str:
        """Append a token, and return the text that is certain now. After a stop, return nothing."""
        self._tokens.append(token)
        return self._given(self._new_text(last=False), last=False)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the generation."""
        return self._given(self._new_text(last=True), last=True)

    def _new_text(self, *, last: bool) -> str:
        """Return the text of the tokens that are not decoded yet, or nothing if a character is incomplete."""
        before = self._decode(self._tokens[self._start : self._decoded])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and not last):
            return ""
        # The tokens decoded last are the context of the next ones.
        self._start, self._decoded = self._decoded, len(self._tokens)
        return text[len(before) :]

    def _given(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        kept = 0 if last else possible_stop(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a stop may begin."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
