"""Texts that a model writes for requests, as an asyncio task receives them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, final

from headwater.core.errors import DataError, HeadwaterError
from headwater.data.codec import Codec
from headwater.generation.beams import BeamSearch
from headwater.generation.requests import FinishReason, Generation, GenerationRequest
from headwater.generation.sampling import Chosen, Sampling
from headwater.serving.passages import PassagePrompts
from headwater.serving.text import TextStream
from headwater.serving.tokens import TokenTexts
from headwater.serving.worker import Worker

LONGEST_TOKEN = 256
"""Characters of a long token. A prompt with more characters for each position of the model is refused."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model that answers requests.

    Attributes:
        name: its name in requests.
        codec: its tokenizer.
        vocab_size: tokens in the model's vocabulary.
        worker: generates.
        created: seconds since 1970 at which the server opened it.
        source: the folder of its weights, and its checkpoint.
        passages: puts passages before the question of a chat; `None`: no passages.
    """

    name: str
    codec: Codec
    vocab_size: int
    worker: Worker
    created: int
    source: str
    passages: PassagePrompts | None = None

    @functools.cached_property
    def tokens(self) -> TokenTexts:
        """Texts and bytes of its tokens."""
        return TokenTexts(self.codec)


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A text to write.

    Attributes:
        prompt: token ids before the text.
        max_new_tokens: largest number of tokens of the text; as many as fit into the model if not given.
        sampling: how tokens are chosen.
        stops: strings that end the text.
        top_log_probabilities: number of most likely tokens with their log-probabilities for each token;
            `None`: no log-probabilities.
        beams: see `GenerationRequest`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...] = ()
    top_log_probabilities: int | None = None
    beams: BeamSearch | None = None


class Delta(NamedTuple):
    """A new piece of a text.

    Attributes:
        text: the piece; may be empty.
        chosen: the token that was generated, without end tokens; `None` at the end of the text.
    """

    text: str
    chosen: Chosen | None = None


@final
class Writing:
    """A text that a model is writing. Made in the asyncio loop that reads it.

    Args:
        model: the model.
        request: the text.

    Raises:
        DataError: if the request does not fit the model.
        HeadwaterError: if the model cannot be used any more.

    Attributes:
        request: the text.
        reason: why the text has ended; `None` until then.
        num_tokens: generated tokens so far.
    """

    def __init__(self, model: ServedModel, request: TextRequest) -> None:
        self.request = request
        self.reason: FinishReason | None = None
        self.num_tokens = 0
        self._worker = model.worker
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | Generation | HeadwaterError] = asyncio.Queue()
        self._ends = frozenset(model.codec.ends)
        self._stream = TextStream(model.codec.decode, request.prompt, request.stops)
        prompt = len(request.prompt)
        room = max(1, model.worker.max_length - prompt + 1)
        self._generation = model.worker.submit(
            GenerationRequest(
                request.prompt,
                room if request.max_new_tokens is None else request.max_new_tokens,
                request.sampling,
                self._ends,
                self._receive,
                request.top_log_probabilities,
                request.beams,
            ),
            self._ended,
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the pieces of the text until its end.

        Raises:
            HeadwaterError: if the model fails.
        """
        while True:
            item = await self._queue.get()
            if isinstance(item, HeadwaterError):
                raise item
            if isinstance(item, Generation):
                self.reason = item.reason
                return
            self.num_tokens += item.chosen is not None
            yield item

    def cancel(self) -> None:
        """Stop writing. Without effect after the end of the text."""
        if self.reason is None:
            self._worker.cancel(self._generation)

    def _receive(self, chosen: Chosen) -> bool:
        if chosen.token in self._ends:
            return True
        self._put(Delta(self._stream.add(chosen.token), chosen))
        return self._stream.stopped

    def _ended(self, generation: Generation, error: HeadwaterError | None) -> None:
        if error is not None:
            self._put(error)
            return
        self._put(Delta(self._stream.finish()))
        self._put(generation)

    def _put(self, item: Delta | Generation | HeadwaterError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, so no task waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def encoded(model: ServedModel, text: str) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        DataError: see `check_length`.
    """
    check_length(model, len(text))
    return model.codec.encode(text)


def check_length(model: ServedModel, characters: int) -> None:
    """Check that a prompt can fit into a model, before the tokenizer takes time and memory for it.

    Raises:
        DataError: if it has too many characters.
    """
    most = LONGEST_TOKEN * model.worker.max_length
    if characters > most:
        raise DataError(
            f"expected a prompt of at most {most} characters, got {characters}",
            where="prompt",
            remedy=f"shorten the prompt: the model reads at most {model.worker.max_length} tokens",
        )


def check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Check that a model has the tokens of a prompt.

    Raises:
        DataError: if a token id is outside of the vocabulary.
    """
    least, largest = min(prompt, default=0), max(prompt, default=0)
    if largest >= vocab_size or least < 0:
        raise DataError(
            f"expected token ids from 0 to {vocab_size - 1}, got {largest if least >= 0 else least}",
            where="prompt",
            remedy="use the tokenizer of the model",
        )


class Text(NamedTuple):
    """A text that was written.

    Attributes:
        text: the text.
        chosen: its tokens.
        reason: why it has ended.
    """

    text: str
    chosen: tuple[Chosen, ...]
    reason: FinishReason


async def whole(writing: Writing) -> Text:
    """Return a whole text. If the task is cancelled, the model stops writing.

    Raises:
        HeadwaterError: if the model fails.
    """
    try:
        pieces = [delta async for delta in writing.deltas()]
    finally:
        writing.cancel()
    assert writing.reason is not None, "a text that has ended has a reason"
    chosen = tuple(delta.chosen for delta in pieces if delta.chosen is not None)
    return Text("".join(delta.text for delta in pieces), chosen, writing.reason)
