"""Cross-entropy, perplexity and bits per byte of texts, by subset (as in the Pile, arXiv:2101.00027)."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headwater.core.errors import DataError
from headwater.core.files import why_unreadable
from headwater.data.codec import Codec
from headwater.evaluation.passes import Request, windows
from headwater.evaluation.scorer import Scorer

ALL = "all"
"""The name of the row of all texts."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that is evaluated alone.

    Attributes:
        text: the text.
        subset: name of its subset.
    """

    text: str
    subset: str


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The evaluation of the texts of a subset.

    Attributes:
        texts: number of texts.
        tokens: their tokens.
        num_bytes: their bytes in UTF-8.
        log_likelihood: natural logarithm of their probability.
    """

    texts: int = 0
    tokens: int = 0
    num_bytes: int = 0
    log_likelihood: float = 0.0

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )

    @property
    def cross_entropy(self) -> float:
        """Mean over the tokens, in nats."""
        return -self.log_likelihood / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the cross-entropy; infinite if that is too large for a float."""
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of text; comparable between tokenizers."""
        return -self.log_likelihood / (math.log(2) * self.num_bytes)


def read_texts(path: Path, field: str = "text", subset: str = "meta.pile_set_name") -> Iterator[Text]:
    """Yield the texts of a file.

    Args:
        path: JSON Lines if the name ends in `.jsonl`, else one text; `.gz` after that: compressed.
        field: key of the text in a record; dots lead into nested records.
        subset: key of the name of its subset. Records without it belong to the subset with the file's name.

    Raises:
        DataError: if the file cannot be read, or a record has no text.
    """
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8") if plain != path else path.open(encoding="utf-8") as file
        ):
            if plain.suffix != ".jsonl":
                yield Text(file.read(), path.name)
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text(line, field, subset, path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the texts cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="name a UTF-8 text or .jsonl file",
        ) from error


def _text(line: str, field: str, subset: str, path: Path, number: int) -> Text:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"expected a JSON record, got an error: {error}",
            where=f"{path}, line {number}",
            remedy="write one JSON object per line",
        ) from error
    text, name = _value(record, field), _value(record, subset)
    if not isinstance(text, str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f"expected a text under {field!r}, found {type(text).__name__}; keys: {keys}",
            where=f"{path}, line {number}",
            remedy="name the key of the text with --text_field",
        )
    return Text(text, path.name if name is None else str(name))


def _value(record: Any, key: str) -> Any:
    for part in key.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def score_texts(scorer: Scorer, codec: Codec, texts: Iterable[Text]) -> dict[str, TextScore]:
    """Return the evaluation of each subset, in the order of their first texts, and of all texts under `ALL`.

    Each text is evaluated alone: its first token is predicted after the tokenizer's first or end token.

    Raises:
        DataError: if all texts are empty.
    """
    read = [(each, codec.encode(each.text, special=False)) for each in texts]
    requests: list[Request] = []
    spans: list[tuple[Text, int, slice]] = []
    for each, tokens in read:
        first = len(requests)
        requests += windows(tokens, codec.prefix, scorer.max_length)
        spans.append((each, len(tokens), slice(first, len(requests))))
    if not requests:
        raise DataError("the texts have no token", where="--text", remedy="name a file with text")
    found = scorer.scores(requests)
    totals: dict[str, TextScore] = {}
    for each, count, span in spans:
        score = TextScore(1, count, len(each.text.encode()), sum(part.log_likelihood for part in found[span]))
        totals[each.subset] = totals.get(each.subset, TextScore()) + score
    return totals | {ALL: sum(totals.values(), TextScore())}
