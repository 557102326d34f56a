"""The base class of answers, for every kind of model."""

from __future__ import annotations

import abc
from typing import Any


class Answer(abc.ABC):
    """The answer of a model to one request. Any thread may create it; `begin` starts the computation.

    Attributes:
        model_name: name of the model.
        num_texts: number of texts that the model computes for the answer.
        prompt_tokens: number of tokens that the model reads.
    """

    def __init__(self, model_name: str, num_texts: int, prompt_tokens: int) -> None:
        self.model_name = model_name
        self.num_texts = num_texts
        self.prompt_tokens = prompt_tokens

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int:
        """Generated tokens so far."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin to compute. Call this in the asyncio loop that reads the answer.

        Raises:
            DataError: if a request does not fit the model.
            HeadwaterError: if the model cannot be used any more.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """Stop computing."""

    @abc.abstractmethod
    async def body(self) -> Any:
        """Return the whole answer as JSON."""
