"""Mode for extractive summarization: sentences, labelled if they belong to the summary."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.core.errors import DataError
from headwater.core.units import counted
from headwater.data.modes.base import (
    Context,
    Example,
    Tokens,
    Unusable,
    filled,
    find_field,
    renamed,
)
from headwater.data.raw_records import Record, checked_text
from headwater.data.text.wordpiece import BEGIN, SEPARATOR

_SENTENCES = ("source", "sentences", "src")
_LABELS = ("source_labels", "labels")


def chosen_sentences(context: Context, record: Record) -> Example:
    """Return an example with the tokens of all sentences, the start of each, and its label.

    A sentence stands between `[CLS]`, whose output the model classifies, and `[SEP]` (arXiv:1908.08345,
    section 3.1). If the text is too long, its last sentences are cut.
    """
    record = renamed(record, context.options)
    sentences, labels = find_field(record, *_SENTENCES), _labels(record)
    if not isinstance(sentences, list) or len(sentences) != len(labels):
        found = (
            counted(len(sentences), "sentence", "sentences")
            if isinstance(sentences, list)
            else f"no list of sentences ({type(sentences).__name__})"
        )
        raise DataError(
            f"expected one label per sentence, got {found} and {counted(len(labels), 'label', 'labels')}",
            where=record.where,
            remedy="write a list of sentences, and a list with a 0 or 1 for each",
        )
    begin, separator = ([context.token(name)] for name in (BEGIN, SEPARATOR))
    parts: list[Tokens] = []
    for sentence in sentences:
        tokens = context.encode(checked_text(sentence, _SENTENCES[0], record.where).strip())
        parts.append(np.concatenate([begin, tokens, separator], dtype=np.int32))
    if not any(len(part) > 2 for part in parts):
        raise Unusable("empty")
    ends = np.cumsum([len(part) for part in parts])
    kept = min(int((ends <= context.length).sum()), context.options.max_cls_tokens)
    if kept < len(parts):
        if context.options.longer == "skip" or not kept:
            raise Unusable("too_long")
        context.counts["cut"] += 1
    starts = np.concatenate([[0], ends[:-1]])[:kept].astype(np.int32)
    return np.concatenate(parts[:kept]), starts, np.array(labels[:kept], dtype=np.int32)


def _labels(record: Record) -> list[int]:
    """Return the label of each sentence: 1 if it belongs to the summary, otherwise 0."""
    labels: Any = find_field(record, *_LABELS)
    is_list = isinstance(labels, list)
    wrong = [label for label in labels if label not in (0, 1)] if is_list else [labels]
    if wrong:
        place = " in it" if is_list else ""
        raise DataError(
            f"expected a list of 0 and 1 in {_LABELS[0]}, got {wrong[0]!r:.40}{place}",
            where=record.where,
            remedy="use 1 for each sentence of the summary and 0 for the others",
        )
    return list(labels)


def sentence_fields(example: Example, _number: int, context: Context) -> dict[str, Tokens]:
    """Return the fields of a sample; token types alternate between 0 and 1 by sentence."""
    tokens, starts, labels = example
    count = context.options.max_cls_tokens
    sentence = np.zeros_like(tokens)
    sentence[starts[1:]] = 1
    return {
        "input_ids": filled(tokens, context.length, context.pad),
        "attention_mask": filled(np.ones_like(tokens), context.length, 0),
        "token_type_ids": filled(np.cumsum(sentence) % 2, context.length, 0),
        "cls_indices": filled(starts, count, 0),
        "cls_label": filled(labels, count, 0),
        "cls_weights": filled(np.ones_like(starts), count, 0),
    }
