"""Passages for questions: an index together with the encoder of questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headwater.core.errors import DataError
from headwater.data.codec import check_unicode
from headwater.retrieval.encoder import VectorEncoder
from headwater.retrieval.index import Hit, PassageIndex

PASSAGES = 5
"""Passages to find if the user sets no number and the index has that many."""


@final
class Retriever:
    """Finds passages for questions.

    Args:
        index: the index.
        encoder: encoder of questions, of the model that made the index.

    Attributes:
        index: see above.
    """

    def __init__(self, index: PassageIndex, encoder: VectorEncoder) -> None:
        self.index = index
        self._encoder = encoder

    def retrieve(self, questions: Sequence[str], k: int | None = None) -> list[list[Hit]]:
        """Return the `k` best passages for each question, the best one first.

        Args:
            questions: the questions.
            k: number of passages; by default 5, or all if the index has fewer.

        Raises:
            DataError: if a question is empty, not valid Unicode or longer than the encoder reads, or the
                index has fewer than `k` passages.
            CorruptError: if a file of the index is damaged.
        """
        for question in questions:
            check_unicode(question, "question")
        texts = self._encoder.texts
        tokens = texts.of(questions)
        if not all(question.strip() for question in questions):
            raise DataError("the question is empty", remedy="write at least one word")
        longest = max(map(len, tokens), default=0)
        if longest > texts.length:
            raise DataError(
                f"expected a question of at most {texts.length} tokens, which the encoder reads; "
                f"got {longest}",
                remedy="write a shorter question",
            )
        count = min(PASSAGES, len(self.index)) if k is None else k
        return self.index.search(self._encoder.encode(tokens), count)
