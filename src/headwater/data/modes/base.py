"""Common parts of the modes: options, context with the tokenizer, and access to fields of records."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headwater.core.errors import ConfigError, DataError
from headwater.data.raw_records import Record, checked_text
from headwater.data.words import TextEncoder

Tokens = npt.NDArray[np.int32]

Example = tuple[Tokens, ...]
"""Rows of numbers that a mode makes of one text or record; rows may differ in length."""


@dataclasses.dataclass(frozen=True)
class ModeOptions:
    """Options of `headwater data` for the modes that turn records into samples.

    Attributes:
        longer: skip or cut a record that has more tokens than a sample.
        keys: names that fields have in the records: pairs of (field, name in the records).
        use_vsl: pack several examples into a sample; each attends only to itself.
        fim_rate: fraction of the texts that are rearranged for fill in the middle.
        spm_rate: fraction of the rearranged texts with the suffix first.
        chat_template: Jinja template of conversations; by default that of the tokenizer, or else a plain one.
        separator: text between a prompt and its completion, or a document and its summary. By default
            "\n\nTL;DR: " before summaries, an empty line after an `instruction`, and nothing after other
            prompts.
        num_passages: number of passages of a question, including the right one.
        max_cls_tokens: maximum sentences of a text in extractive summarization.
        labels: names of the classes of texts, in the order of their numbers; empty if records have numbers.
        sentence_pairs: make each masked sample of two texts; the second may or may not follow the first.
        masked_lm_prob: fraction of the tokens to predict.
        dynamic_mask: write unmasked tokens; training chooses the masked tokens in every epoch.
        image_dir: root folder of the images.
        num_features: positions that an image takes in a text: `num_features` of the model.
        num_images: maximum images of a text.
        image_token_id: token at the positions of images, as in the model's section.
        begin_of_text: token before each text with images; `None`: no token.

    Raises:
        ConfigError: if an option is out of range.
    """

    longer: Literal["skip", "cut"] = "skip"
    keys: tuple[tuple[str, str], ...] = ()
    use_vsl: bool = False
    fim_rate: float = 0.9
    spm_rate: float = 0.5
    chat_template: str | None = None
    separator: str | None = None
    num_passages: int = 2
    max_cls_tokens: int = 50
    labels: tuple[str, ...] = ()
    sentence_pairs: bool = True
    masked_lm_prob: float = 0.15
    dynamic_mask: bool = False
    image_dir: Path | None = None
    num_features: int | None = None
    num_images: int = 1
    image_token_id: int = 0
    begin_of_text: str | None = None

    def __post_init__(self) -> None:
        for key in ("fim_rate", "spm_rate", "masked_lm_prob"):
            if not 0 <= getattr(self, key) <= 1:
                what = f"expected {key} in [0, 1], got {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="use a fraction between 0 and 1")
        for key in ("num_passages", "max_cls_tokens", "num_features", "num_images"):
            if (getattr(self, key) or 0) < 1 and getattr(self, key) is not None:
                what = f"expected {key} of at least 1, got {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="use 1 or more")
        if len(set(self.labels)) < len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ConfigError(
                f"expected different classes, got {twice!r} twice",
                where="labels",
                remedy="name each class once",
            )
        if self.image_token_id < 0:
            what = f"expected image_token_id of at least 0, got {self.image_token_id}"
            raise ConfigError(what, where="image_token_id", remedy="use the id of a token of the model")
        if self.image_dir is not None and not self.image_dir.is_dir():
            remedy = "set it to the root folder of the images"
            raise ConfigError("image_dir is not a folder", where=str(self.image_dir), remedy=remedy)


class Unusable(Exception):
    """Raised if no example can be made of a record. Such records are counted by their `reason`."""

    def __init__(self, reason: Literal["empty", "too_long"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass
class Context:
    """Settings, tokenizer and counters that a mode works with.

    Attributes:
        tokenizer: tokenizer of the model.
        end: id of the end-of-text token.
        pad: id of the padding token.
        length: tokens per sample.
        options: options of the mode.
        seed: seed of all random choices.
        counts: counters of the current task, for example bytes of text and records that were cut.
    """

    tokenizer: Tokenizer
    end: int
    pad: int
    length: int
    options: ModeOptions
    seed: int
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @functools.cached_property
    def encoder(self) -> TextEncoder:
        """Encoder of texts without special tokens."""
        return TextEncoder(self.tokenizer)

    @functools.cached_property
    def ordinary(self) -> Tokens:
        """Ids of BERT's tokens that represent text, [tokens]: those that do not begin with a bracket."""
        vocabulary = self.tokenizer.get_vocab()
        numbers = sorted(number for token, number in vocabulary.items() if not token.startswith("["))
        return np.array(numbers, dtype=np.int32)

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text and count its bytes."""
        self.counts["text_bytes"] += len(text.encode())
        return self.encoder([text])[0]

    def ended(self, tokens: Tokens) -> Tokens:
        """Return `tokens` followed by the end-of-text token."""
        return np.append(tokens, np.int32(self.end))

    def token(self, *names: str) -> int:
        """Return the id of the first of these tokens that the tokenizer has.

        Raises:
            DataError: if the tokenizer lacks all of them.
        """
        numbers = [self.tokenizer.token_to_id(name) for name in names]
        found = next((number for number in numbers if number is not None), None)
        if found is None:
            raise DataError(
                f"the tokenizer has no token {names[0]}",
                where="--tokenizer",
                remedy="pass the tokenizer of the model that you train; for BERT its vocab.txt",
            )
        return int(found)


Make = Callable[[Context, Sequence[Any], int], Iterator[Example | DataError | Unusable]]
"""Function that makes examples of some pieces or records; the last argument is the number of the task."""


def of_records(make: Callable[[Context, Record], Example]) -> Make:
    """Return a `Make` that makes one example of each record; errors are yielded, not raised."""

    def run(
        context: Context, records: Sequence[Record], _task: int
    ) -> Iterator[Example | DataError | Unusable]:
        for record in records:
            before = dict(context.counts)
            try:
                yield make(context, record)
            except (DataError, Unusable) as problem:
                context.counts.clear()  # a record that is left out must not count as text or as cut
                context.counts.update(before)
                yield problem

    return run


def renamed(record: Record, options: ModeOptions) -> Record:
    """Return the record with copies of its fields under the names in `options.keys`.

    Raises:
        DataError: if the record lacks one of these fields.
    """
    if not options.keys:
        return record
    fields = dict(record.fields)
    for field, key in options.keys:
        if key not in record.fields:
            raise no_field(record, key)
        fields[field] = record.fields[key]
    return dataclasses.replace(record, fields=fields)


def find_field(record: Record, *names: str) -> Any:
    """Return the value of the first of these fields that the record has.

    Raises:
        DataError: if the record lacks all of them.
    """
    for name in names:
        # A parquet file has all columns in every record: a missing field is None.
        if record.fields.get(name) is not None:
            return record.fields[name]
    raise no_field(record, names[0])


def find_text(record: Record, *names: str) -> str:
    """Return the text of the first of these fields that the record has.

    Raises:
        DataError: if the record lacks all of them, or the value is not text.
    """
    return checked_text(find_field(record, *names), names[0], record.where)


def no_field(record: Record, name: str) -> DataError:
    """Return the error for a record that lacks a field."""
    there = ", ".join(map(repr, record.fields)) or "none"
    remedy = f"name the field of the record that holds it: --keys {name}=NAME"
    return DataError(f"record has no field {name!r}; its fields: {there}", where=record.where, remedy=remedy)


def filled(values: npt.ArrayLike, length: int, fill: int) -> Tokens:
    """Return a row of `length` numbers: `values`, then `fill`.

    Args:
        values: at most `length` numbers.
        length: length of the row.
        fill: number after the values.

    Returns:
        The row, int32 [length].
    """
    row = np.full(length, fill, dtype=np.int32)
    numbers = np.asarray(values, dtype=np.int32)
    row[: len(numbers)] = numbers
    return row
