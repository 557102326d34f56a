"""Text and bytes of single tokens, which log-probabilities name."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, final

from headwater.data.codec import Codec
from headwater.serving.text import UNFINISHED


class TokenText(NamedTuple):
    """A single token.

    Attributes:
        text: its text; the bytes of an incomplete character are the character U+FFFD.
        bytes: its bytes; `None` if the tokenizer has no bytes for an incomplete character.
    """

    text: str
    bytes: bytes | None


@final
class TokenTexts:
    """Texts of a tokenizer's tokens. Each token is decoded once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            text = self._text(token)
            found = TokenText(text, self._bytes(token) if UNFINISHED in text else text.encode())
            self._known[token] = found
        return found

    def _text(self, token: int) -> str:
        # After another token: some tokenizers drop the space at the beginning of a text.
        once = self._codec.decode([token])
        return self._codec.decode([token, token])[len(once) :] or once

    def _bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that has a part of a character."""
        name, text = str(self._codec.tokenizer.id_to_token(token)), self._codec.decode([token])
        if UNFINISHED in name:  # the character itself
            return text.encode()
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):  # a token of SentencePiece for one byte
            found = bytes([int(name[3:5], 16)])
        elif all(character in _byte_of_character() for character in name):
            found = bytes(map(_byte_of_character().__getitem__, name))
        else:
            return None
        # A tokenizer of another kind may have such names for other texts.
        return found if found.decode(errors="replace") == text else None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character means in the tokens of byte-level BPE (that of GPT-2).

    A printable byte of Latin-1 is its own character. The others are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
