"""Passages before the question of a chat."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import final

from headwater.retrieval.prompt import FittedPrompt, PassageTemplate, fitted
from headwater.retrieval.retriever import PASSAGES, Retriever


@final
class PassagePrompts:
    """Finds passages for questions and puts them before the questions. Any thread may use it.

    Args:
        retriever: finds passages.
        template: arranges passages and question.
        num_passages: passages to find; see `Retriever.retrieve`.

    Raises:
        DataError: if the index has fewer passages.

    Attributes:
        source: identifies the index, the template and the number of passages.
    """

    def __init__(self, retriever: Retriever, template: PassageTemplate, num_passages: int | None) -> None:
        if num_passages is not None:
            retriever.index.check_count(num_passages)
        self._retriever = retriever
        self._template = template
        self._num_passages = num_passages
        index = retriever.index
        self.source = (
            f"index {index.folder.resolve()} (checksum {zlib.crc32(index.manifest.to_json())}), "
            f"{num_passages or PASSAGES} passages, template {template.text!r}"
        )
        # The encoder computes for one thread at a time.
        self._lock = threading.Lock()

    def prompt(self, question: str, tokens_of: Callable[[str], list[int]], most: int) -> FittedPrompt:
        """Return the prompt with the passages that fit.

        Args:
            question: the question.
            tokens_of: returns the tokens of a prompt with a text instead of the question.
            most: most tokens of the prompt.

        Raises:
            DataError: if the question is not suitable, or not even the best passage fits.
            CorruptError: if the index is damaged.
        """
        with self._lock:
            hits = self._retriever.retrieve([question], self._num_passages)[0]
        return fitted(hits, lambda some: tokens_of(self._template.prompt(some, question)), most)
