"""What the modes of preparation share: their options, the tokenizer at hand, fields of records."""

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
"""What a mode makes of a text or record: several rows of numbers, each of any length."""


@dataclasses.dataclass(frozen=True)
class ModeOptions:
    """What the modes take beside text and tokenizer.

    Attributes:
        longer: what becomes of a record with more tokens than a sample holds: it is left out, or cut.
        keys: other names of fields: (field, name in the records).
        use_vsl: put several examples into a sample, each seeing itself alone.
        fim_rate: share of the texts that are turned for filling in the middle.
        spm_rate: of these the share whose suffix comes first.
        chat_template: Jinja template of conversations; that of the tokenizer, or a plain one, where absent.
        separator: text between a prompt or document and what follows it; where absent "\n\nTL;DR: " before
            summaries, an empty line after an `instruction`, and nothing after other prompts.
        num_passages: passages of a question, the right one included.
        max_cls_tokens: sentences of a text at most, where they are chosen for a summary.
        sentence_pairs: masked samples are two texts, of which the second may or may not follow the first.
        masked_lm_prob: share of the tokens that are guessed.
        dynamic_mask: leave the choice of these tokens to the training.
        image_dir: folder below which the images of texts are.
        num_features: places that an image takes in a text: `num_features` of the model.
        num_images: images of a text at most.
        image_token_id: token in the places of images, as in the model's section.
        begin_of_text: token that a text with images begins with; none where absent.
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
                what = f"{key} is {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="write a fraction between 0 and 1")
        for key in ("num_passages", "max_cls_tokens", "num_features", "num_images"):
            if (getattr(self, key) or 0) < 1 and getattr(self, key) is not None:
                what = f"{key} is {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="write 1 or more")
        if self.image_token_id < 0:
            what = f"image_token_id is {self.image_token_id}"
            raise ConfigError(what, where="image_token_id", remedy="write a token of the model, 0 or more")
        if self.image_dir is not None and not self.image_dir.is_dir():
            remedy = "name the folder below which the images are"
            raise ConfigError("image_dir is not a folder", where=str(self.image_dir), remedy=remedy)


class Unusable(Exception):
    """A record that gives no example; `reason` is the name of its count."""

    def __init__(self, reason: Literal["empty", "too_long"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass
class Context:
    """What a mode works with.

    Attributes:
        tokenizer: of the model.
        end: token that ends a text.
        pad: token that fills samples up.
        length: tokens of a sample.
        options: of the mode.
        seed: of everything random.
        counts: what happened: bytes of text, records that were cut.
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
        """Of single texts."""
        return TextEncoder(self.tokenizer)

    @functools.cached_property
    def ordinary(self) -> Tokens:
        """Tokens that stand for text: BERT's others are written in brackets."""
        vocabulary = self.tokenizer.get_vocab()
        numbers = sorted(number for token, number in vocabulary.items() if not token.startswith("["))
        return np.array(numbers, dtype=np.int32)

    def encode(self, text: str) -> Tokens:
        """Tokens of a text."""
        self.counts["text_bytes"] += len(text.encode())
        return self.encoder([text])[0]

    def ended(self, tokens: Tokens) -> Tokens:
        """Tokens with the one that ends a text."""
        return np.append(tokens, np.int32(self.end))

    def token(self, *names: str) -> int:
        """Number of the first of these tokens that the tokenizer has.

        Raises:
            DataError: if it has none.
        """
        numbers = [self.tokenizer.token_to_id(name) for name in names]
        found = next((number for number in numbers if number is not None), None)
        if found is None:
            raise DataError(
                f"the tokenizer has no token {names[0]}",
                where="--tokenizer",
                remedy="name the tokenizer of the model that reads these data; for BERT its vocab.txt",
            )
        return int(found)


Make = Callable[[Context, Sequence[Any], int], Iterator[Example | DataError | Unusable]]
"""Examples of some pieces or records; the last argument is the number of the task."""


def of_records(make: Callable[[Context, Record], Example]) -> Make:
    """A mode that makes one example of each record; what cannot be used is given, not raised."""

    def run(
        context: Context, records: Sequence[Record], _task: int
    ) -> Iterator[Example | DataError | Unusable]:
        for record in records:
            before = dict(context.counts)
            try:
                yield make(context, record)
            except (DataError, Unusable) as problem:
                context.counts.clear()  # what is left out has no text and was not cut
                context.counts.update(before)
                yield problem

    return run


def renamed(record: Record, options: ModeOptions) -> Record:
    """The record with the fields that `options.keys` names under the names that the modes know.

    Raises:
        DataError: if it lacks one of them.
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
    """The value of the first of these fields that the record has.

    Raises:
        DataError: if it has none.
    """
    for name in names:
        if record.fields.get(name) is not None:
            return record.fields[name]
    raise no_field(record, names[0])


def find_text(record: Record, *names: str) -> str:
    """The same for a text."""
    return checked_text(find_field(record, *names), names[0], record.where)


def no_field(record: Record, name: str) -> DataError:
    """That a record lacks a field."""
    there = ", ".join(map(repr, record.fields)) or "nothing"
    remedy = f"say which field it is with --keys {name}=NAME"
    return DataError(f"record has no field {name!r}, it has {there}", where=record.where, remedy=remedy)


def filled(values: npt.ArrayLike, length: int, fill: int) -> Tokens:
    """Numbers filled up to `length`."""
    row = np.full(length, fill, dtype=np.int32)
    numbers = np.asarray(values, dtype=np.int32)
    row[: len(numbers)] = numbers
    return row
