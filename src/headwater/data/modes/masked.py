"""Mode for BERT: pairs of texts with masked tokens to predict; the second text may follow the first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from headwater.core.seeding import derive_seed
from headwater.data.documents import Piece
from headwater.data.modes.base import Context, Example, Tokens, filled
from headwater.data.order import random_generator
from headwater.data.text.masks import choose_masks
from headwater.data.text.wordpiece import BEGIN, MASK, PAD, SEPARATOR

_SENTENCES = re.compile(r"(?<=[.!?])[\"')\]”’]*\s+|\n\s*\n")
_SHORT_SHARE = 0.1
"""Fraction of the samples that are made shorter than possible (arXiv:1810.04805, appendix A.2)."""


def masked_pairs(context: Context, pieces: Sequence[Piece], task: int) -> Iterator[Example]:
    """Yield an example for each pair of texts: tokens, length of the first, and if the second is random.

    The length includes the special tokens. Half of the second texts follow the first; the others are random:
    they come from another document of the same task (arXiv:1810.04805, appendix A.2). Without
    `sentence_pairs`, an example is one text.
    """
    generator = np.random.default_rng(derive_seed(context.seed, "sentence pairs", task))
    begin, separator = (np.array([context.token(name)], dtype=np.int32) for name in (BEGIN, SEPARATOR))
    documents = [_sentences(context, piece) for piece in pieces]
    documents = [document for document in documents if document]
    for number in range(len(documents)):
        make = _pairs if context.options.sentence_pairs else _singles
        for first, second, random in make(documents, number, context.length, generator):
            tokens = [begin, first, separator] + ([second, separator] if len(second) else [])
            yield np.concatenate(tokens), np.array([len(first) + 2, random], dtype=np.int32)


def _sentences(context: Context, piece: Piece) -> list[Tokens]:
    context.counts["text_bytes"] += piece.text_bytes
    sentences = [sentence for sentence in _SENTENCES.split(piece.text) if sentence.strip()]
    return [tokens for tokens in context.encoder(sentences) if len(tokens)]


_Pairs = Iterator[tuple[Tokens, Tokens, bool]]
_NOTHING = np.empty(0, dtype=np.int32)


def _singles(
    documents: list[list[Tokens]], number: int, length: int, _generator: np.random.Generator
) -> _Pairs:
    tokens = np.concatenate(documents[number])
    for start in range(0, len(tokens), length - 2):
        yield tokens[start : start + length - 2], _NOTHING, False


def _pairs(documents: list[list[Tokens]], number: int, length: int, generator: np.random.Generator) -> _Pairs:
    document, place = documents[number], 0
    while place < len(document):
        room = length - 3
        wanted = int(generator.integers(2, room + 1)) if generator.random() < _SHORT_SHARE else room
        stop, total = place, 0
        while stop < len(document) and total < wanted:
            total += len(document[stop])
            stop += 1
        middle = place + (int(generator.integers(1, stop - place)) if stop - place > 1 else 1)
        first = np.concatenate(document[place:middle])
        # If no sentence is left to follow the first text, the second must be a random one.
        random = len(documents) > 1 and (stop == middle or bool(generator.random() < 0.5))
        if random:
            second = _elsewhere(documents, number, wanted - len(first), generator)
            stop = middle  # the sentences after the first text begin the next sample
        else:
            second = np.concatenate(document[middle:stop]) if stop > middle else _NOTHING
        place = stop
        first, second = _fitting(first, second, room, generator)
        if len(second):
            yield first, second, random


def _elsewhere(
    documents: list[list[Tokens]], number: int, wanted: int, generator: np.random.Generator
) -> Tokens:
    """Return whole sentences from a random place in another document, about `wanted` tokens."""
    other = int(generator.integers(0, len(documents) - 1))
    document = documents[other + (other >= number)]
    place = int(generator.integers(0, len(document)))
    stop, total = place, 0
    while stop < len(document) and (stop == place or total < wanted):
        total += len(document[stop])
        stop += 1
    return np.concatenate(document[place:stop])


def _fitting(
    first: Tokens, second: Tokens, room: int, generator: np.random.Generator
) -> tuple[Tokens, Tokens]:
    """Cut two texts until both have `room` tokens together. The longer is cut, at its beginning or end."""
    texts = [first, second]
    while (excess := len(texts[0]) + len(texts[1]) - room) > 0:
        longer = int(len(texts[1]) > len(texts[0]))
        # Cut at most until both texts are equally long; then choose the longer text again.
        count = min(excess, max(1, len(texts[longer]) - len(texts[1 - longer])))
        at_start = generator.random() < 0.5
        texts[longer] = texts[longer][count:] if at_start else texts[longer][:-count]
    return texts[0], texts[1]


def masked_fields(example: Example, number: int, context: Context) -> dict[str, Tokens]:
    """Return the fields of a sample for BERT; the masked tokens are the same in every epoch."""
    tokens, about = example
    length, options = context.length, context.options
    generator = random_generator(context.seed, "masking", number)
    special = [context.token(name) for name in (BEGIN, SEPARATOR, PAD)]
    predictions = math.ceil(options.masked_lm_prob * length)
    ids, chosen = choose_masks(
        tokens.astype(np.int64),
        ~np.isin(tokens, special),
        ordinary=context.ordinary,
        mask=context.token(MASK),
        share=options.masked_lm_prob,
        most=predictions,
        generator=generator,
    )
    fields = {
        "input_ids": filled(ids, length, context.pad),
        "attention_mask": filled(np.ones_like(tokens), length, 0),
        "token_type_ids": filled(_types(tokens, about), length, 0),
        "masked_lm_positions": filled(chosen, predictions, 0),
        "masked_lm_ids": filled(tokens[chosen], predictions, 0),
        "masked_lm_weights": filled(np.ones_like(chosen), predictions, 0),
    }
    if options.sentence_pairs:
        fields["next_sentence_label"] = about[1]
    return fields


def _types(tokens: Tokens, about: Tokens) -> Tokens:
    types: Tokens = (np.arange(len(tokens)) >= about[0]).astype(np.int32)
    return types


def masked_table(example: Example, _number: int, context: Context) -> dict[str, object]:
    """Return a row of a CSV file: unmasked tokens as text, and their segments. Training masks them later."""
    tokens, about = example
    line: dict[str, object] = {
        "tokens": [context.tokenizer.id_to_token(int(token)) for token in tokens],
        "segment_ids": _types(tokens, about).tolist(),
    }
    return line | ({"is_random_next": int(about[1])} if context.options.sentence_pairs else {})
