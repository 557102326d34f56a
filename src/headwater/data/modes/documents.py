"""Modes that read running text: next tokens, fill in the middle, and lines of text for span corruption."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headwater.core.seeding import derive_seed
from headwater.data.documents import Piece
from headwater.data.modes.base import Context, Example, Tokens

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_FIM_NAMES = tuple((name, name.replace("|", "")) for name in FIM_TOKENS)
_FIM_MARGIN = 8
"""Tokens reserved in a text that is rearranged: three sentinels, the end-of-text token, and a few more
because a word that is cut in two may have more tokens."""

_PARAGRAPHS = re.compile(r"\n\s*\n")


def next_words(context: Context, pieces: Sequence[Piece], _task: int) -> Iterator[Example]:
    """Yield texts, cut to the length of a sample. The last token of a part also begins the next part."""
    for piece in pieces:
        tokens = context.encode(piece.text)
        if piece.ends_document:
            tokens = context.ended(tokens)
        for start in range(0, len(tokens) - 1, context.length):
            part = tokens[start : start + context.length + 1]
            yield part, np.ones_like(part)


def fill_in_the_middle(context: Context, pieces: Sequence[Piece], task: int) -> Iterator[Example]:
    """Yield texts, most of them rearranged so that the middle comes last (arXiv:2207.14255, section 3).

    A text is cut at two characters, which are drawn uniformly. The order of the parts is prefix, suffix,
    middle (PSM), or suffix, prefix, middle with the sentinels as in appendix D (SPM).
    """
    prefix_id, middle_id, suffix_id = (context.token(*names) for names in _FIM_NAMES)
    options = context.options
    generator = np.random.default_rng(derive_seed(context.seed, "fill in the middle", task))
    for piece in pieces:
        for text, whole in _parts(context, piece):
            if generator.random() >= options.fim_rate:
                tokens = context.ended(whole)
            else:
                first, second = np.sort(generator.integers(0, len(text) + 1, 2))
                prefix, middle, suffix = (
                    context.encoder([part])[0] for part in (text[:first], text[first:second], text[second:])
                )
                parts: tuple[npt.ArrayLike, ...]
                if generator.random() < options.spm_rate:
                    parts = ([prefix_id, suffix_id], suffix, [middle_id], prefix, middle)
                else:
                    parts = ([prefix_id], prefix, [suffix_id], suffix, [middle_id], middle)
                joined = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
                tokens = context.ended(joined)
            # If a word is cut in two, its parts may have more tokens than the margin allows.
            tokens = tokens[-(context.length + 1) :]
            yield tokens, np.ones_like(tokens)


def _parts(context: Context, piece: Piece) -> Iterator[tuple[str, Tokens]]:
    """Yield the parts of a text that fit into a sample, each with its tokens."""
    room = max(context.length - _FIM_MARGIN, 1)
    encoding = context.tokenizer.encode(piece.text, add_special_tokens=False)
    tokens = np.array(encoding.ids, dtype=np.int32)
    context.counts["text_bytes"] += piece.text_bytes
    starts = list(range(0, len(tokens), room))
    places = [encoding.offsets[start][0] for start in starts[1:]] + [len(piece.text)]
    place = 0
    for start, stop in zip(starts, places, strict=True):
        # Several tokens of one character have the same offset, so a part may be without text.
        if stop > place:
            yield piece.text[place:stop], tokens[start : start + room]
        place = stop


def texts(context: Context, pieces: Sequence[Piece], _task: int) -> Iterator[Example]:
    """Yield an example for each paragraph: its tokens, and the code points of its text on one line."""
    for piece in pieces:
        for paragraph in _PARAGRAPHS.split(piece.text):
            line = " ".join(paragraph.split())
            if line:
                yield context.encode(line), np.frombuffer(line.encode("utf-32-le"), dtype=np.int32)


def line_of(example: Example) -> str:
    """Return the text of an example made by `texts`."""
    return example[1].tobytes().decode("utf-32-le")
