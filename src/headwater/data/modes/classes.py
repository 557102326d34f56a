"""Mode for classification: a text, or a pair of texts, with the number of its class."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.core.errors import DataError
from headwater.core.names import nearest
from headwater.data.modes.base import (
    Context,
    Example,
    Tokens,
    Unusable,
    filled,
    find_field,
    find_text,
    renamed,
)
from headwater.data.raw_records import Record, checked_text

_TEXTS = ("text", "sentence", "sentence1", "premise")
_SECOND = ("text_pair", "sentence2", "hypothesis")
_LABELS = ("label", "labels", "class")


def labelled_text(context: Context, record: Record) -> Example:
    """Return an example with the tokens of a text or pair, the text that each belongs to, and the class.

    The special tokens are those of the tokenizer. If it adds none, the end-of-text token is the first token,
    and follows each text. If there are too many tokens, the longer text is cut at its end.
    """
    record = renamed(record, context.options)
    text, label = find_text(record, *_TEXTS), _class(context, record)
    second = next((record.fields[name] for name in _SECOND if record.fields.get(name) is not None), None)
    texts = [text] if second is None else [text, checked_text(second, _SECOND[0], record.where)]
    if not text.strip():
        raise Unusable("empty")
    whole = _encoded(context, texts, None)
    if len(whole[0]) > context.length:
        if context.options.longer == "skip":
            raise Unusable("too_long")
        whole = _encoded(context, texts, context.length)
        context.counts["cut"] += 1
    context.counts["text_bytes"] += sum(len(each.encode()) for each in texts)
    tokens, segments = whole
    return _row(tokens), _row(segments), _row([label])


def _encoded(context: Context, texts: list[str], length: int | None) -> tuple[list[int], list[int]]:
    """Return the tokens of one or two texts, at most `length`, and the number of the text of each token."""
    tokenizer = context.tokenizer
    if tokenizer.encode("").ids:
        if length is not None:
            tokenizer.enable_truncation(length)
        try:
            found = tokenizer.encode(texts[0], texts[1] if len(texts) > 1 else None)
        finally:
            tokenizer.no_truncation()
        return found.ids, found.type_ids
    parts = [list(context.encoder([text])[0]) for text in texts]
    if length is not None:
        parts = _shortened(parts, length - len(parts) - 1)
    tokens, segments = [context.end], [0]
    for number, part in enumerate(parts):
        tokens += [*part, context.end]
        segments += [number] * (len(part) + 1)
    return tokens, segments


def _shortened(parts: list[list[int]], room: int) -> list[list[int]]:
    """Return one or two lists with at most `room` elements together: the longer one is cut first."""
    if len(parts) == 1:
        return [parts[0][:room]]
    first = min(len(parts[0]), max(room - len(parts[1]), (room + 1) // 2))
    return [parts[0][:first], parts[1][: room - first]]


def _row(values: list[int]) -> Tokens:
    return np.array(values, dtype=np.int32)


def _class(context: Context, record: Record) -> int:
    """Return the number of the class of a record.

    Raises:
        DataError: if it is neither a number nor one of the names in `--labels`.
    """
    label, names = find_field(record, *_LABELS), context.options.labels
    if names:
        if label in names:
            return names.index(label)
        close = nearest(str(label), names)
        raise DataError(
            f"expected a class of --labels, got {label!r}",
            where=record.where,
            remedy=f"write {close!r}, or add the class to --labels" if close else "add the class to --labels",
        )
    if (number := _number(label)) is not None:
        return number
    raise DataError(
        f"expected the number of a class, got {label!r}",
        where=record.where,
        remedy="name all classes in the order of their numbers, for example --labels negative positive",
    )


def _number(label: Any) -> int | None:
    """Return the number that a label is. In a CSV file all values are text."""
    # The largest number has ten digits. Python refuses to read a text of thousands of digits.
    if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) <= 10:
        label = int(label)
    is_number = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < 1 << 31
    return label if is_number else None


def class_fields(example: Example, _number: int, context: Context) -> dict[str, Any]:
    """Return the fields of a sample: tokens, mask, the text of each token, and the class."""
    tokens, segments, label = example
    return {
        "input_ids": filled(tokens, context.length, context.pad),
        "attention_mask": filled(np.ones_like(tokens), context.length, 0),
        "token_type_ids": filled(segments, context.length, 0),
        "labels": label[0],
    }
