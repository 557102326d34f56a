"""Check of records before the tokenizer exists."""

from __future__ import annotations

from typing import final

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headwater.data.modes import Context, Mode, ModeOptions
from headwater.data.raw_records import Record

_UNKNOWN = "<|endoftext|>"
_LENGTH = 1 << 30
"""Tokens of a sample that is longer than any text."""


@final
class RecordCheck:
    """Finds records from which a mode makes no example with any tokenizer.

    The mode runs with a tokenizer that turns each text into one token. A record that is only too long
    therefore passes the check.

    Args:
        mode: a mode that reads records.
        options: its options.
    """

    def __init__(self, mode: Mode, options: ModeOptions) -> None:
        names = [_UNKNOWN, *mode.needed_tokens, *mode.added_tokens, options.begin_of_text or _UNKNOWN]
        vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_UNKNOWN))
        self._mode = mode
        self._context = Context(tokenizer, 0, 0, _LENGTH, options, 0)

    def __call__(self, record: Record) -> bool:
        """Return False if the mode makes no example from the record."""
        return any(isinstance(made, tuple) for made in self._mode.make(self._context, [record], 0))
