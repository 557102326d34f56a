"""Answers to requests: texts in the JSON of OpenAI's API or of the Cerebras-GPT model card."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, final

from headwater.core.errors import DataError, HeadwaterError
from headwater.core.seeding import derive_seed
from headwater.generation.requests import FinishReason
from headwater.generation.sampling import Chosen, Sampling
from headwater.retrieval.index import Hit
from headwater.retrieval.prompt import FittedPrompt
from headwater.serving.answer import Answer
from headwater.serving.passages import PassagePrompts
from headwater.serving.schemas import CardRequest, ChatRequest, CompletionRequest, TextSettings
from headwater.serving.writing import (
    Delta,
    ServedModel,
    Text,
    TextRequest,
    Writing,
    check_ids,
    check_length,
    encoded,
    whole,
)

Json = dict[str, Any]

_ANSWER_TOKENS = 100
"""New tokens for which passages leave room, if the request names no number."""


class WrittenAnswer(Answer):
    """An answer that a model writes.

    Args:
        model: the model.
        requests: the texts to write.
        prompts: token ids of the prompts. Each prompt may have several texts.

    Raises:
        DataError: if a token id is not one of the model's.

    Attributes:
        model: the model.
        writings: the texts that have begun.
    """

    def __init__(
        self, model: ServedModel, requests: Sequence[TextRequest], prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(model.name, len(requests), sum(map(len, prompts)))
        self.model = model
        self._requests = requests
        self.writings: list[Writing] = []
        for prompt in prompts:
            check_ids(prompt, model.vocab_size)

    def begin(self) -> None:
        try:
            for request in self._requests:
                self.writings.append(Writing(self.model, request))
        except BaseException:  # an interrupt too: no client reads the texts that have begun
            self.cancel()
            raise

    @property
    def num_tokens(self) -> int:
        return sum(writing.num_tokens for writing in self.writings)

    def cancel(self) -> None:
        for writing in self.writings:
            writing.cancel()

    async def texts(self) -> list[Text]:
        """Return the whole texts. If the task is cancelled, the model stops writing."""
        try:
            return list(await asyncio.gather(*map(whole, self.writings)))
        finally:
            self.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Delta | None]]:
        """Yield the pieces of all texts as they are written, each with the number of the text.

        `None` follows the last piece of a text.

        Raises:
            HeadwaterError: if the model fails.
        """
        queue: asyncio.Queue[tuple[int, Delta | HeadwaterError | None]] = asyncio.Queue()

        async def collect(number: int, writing: Writing) -> None:
            try:
                async for delta in writing.deltas():
                    queue.put_nowait((number, delta))
            except HeadwaterError as error:
                queue.put_nowait((number, error))
            queue.put_nowait((number, None))

        tasks = [asyncio.create_task(collect(*each)) for each in enumerate(self.writings)]
        left = len(tasks)
        try:
            while left:
                number, item = await queue.get()
                if isinstance(item, HeadwaterError):
                    raise item
                left -= item is None
                yield number, item
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()


class OpenAIAnswer(WrittenAnswer):
    """An answer of OpenAI's API.

    Args:
        model: the model.
        requests: the texts to write.
        prompts: token ids of the prompts.
        settings: the body of the request.

    Attributes:
        id: identifies the answer.
        streams: True if the client wants the answer in pieces.
    """

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[TextRequest],
        prompts: Sequence[Sequence[int]],
        settings: TextSettings,
    ) -> None:
        super().__init__(model, requests, prompts)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.streams = bool(settings.stream)
        self._created = int(time.time())
        options = settings.stream_options
        self._reports_usage = options is not None and options.include_usage

    @final
    async def body(self) -> Json:
        texts = await self.texts()
        choices = [self.choice(number, text) for number, text in enumerate(texts)]
        return self._frame(self.kind) | self.further_keys() | {"choices": choices, "usage": self._usage()}

    @final
    async def chunks(self) -> AsyncIterator[Json]:
        """Yield the answer in pieces, for server-sent events."""
        frame = self._frame(self.chunk_kind) | ({"usage": None} if self._reports_usage else {})
        found = self.further_keys()
        for number in range(len(self.writings)):
            for first in self.first_choices(number):
                yield frame | found | {"choices": [first]}
                found = {}  # only the first chunk has it
        async for number, delta in self.pieces():
            reason = self.writings[number].reason if delta is None else None
            choice = self.chunk_choice(number, delta or Delta(""), reason)
            if choice is not None:
                yield frame | {"choices": [choice]}
        if self._reports_usage:
            yield frame | {"choices": [], "usage": self._usage()}

    @abc.abstractmethod
    def choice(self, number: int, text: Text) -> Json:
        """Return a whole text as JSON."""

    def further_keys(self) -> Json:
        """Return further keys of the answer, such as the passages that were found for the request."""
        return {}

    def first_choices(self, number: int) -> Sequence[Json]:
        """Return what a stream sends of a text before its first new token, such as the echo of the prompt."""
        return ()

    @abc.abstractmethod
    def chunk_choice(self, number: int, delta: Delta, reason: FinishReason | None) -> Json | None:
        """Return a piece of a text as JSON; `None` if there is nothing to send."""

    def token_text(self, token: int) -> str:
        """Return the text of a single token."""
        return self.model.tokens[token].text

    def _frame(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model.name}

    def _usage(self) -> Json:
        counts = self.prompt_tokens, self.num_tokens
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


@final
class Completion(OpenAIAnswer):
    """An answer of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: CompletionRequest) -> None:
        prompts = [encoded(model, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
        self._n = body.n or 1
        self._offsets: dict[int, int] = {}
        requests = [
            TextRequest(tuple(prompt), body.max_tokens, sampling, body.stops, body.logprobs, body.beams)
            for prompt in prompts
            for sampling in samplings(body, self._n)
        ]
        super().__init__(model, requests, prompts, body)
        # After the ids were checked: the tokenizer cannot decode an id of more than 32 bits.
        self._echoes = (
            [prompt if isinstance(prompt, str) else model.codec.decode(prompt) for prompt in body.prompts]
            if body.echo
            else []
        )

    def choice(self, number: int, text: Text) -> Json:
        return {
            "index": number,
            "text": self._echo(number) + text.text,
            "logprobs": self._log_probabilities(number, text.chosen),
            "finish_reason": text.reason,
        }

    def first_choices(self, number: int) -> Sequence[Json]:
        echo = self._echo(number)
        return [{"index": number, "text": echo, "logprobs": None, "finish_reason": None}] if echo else ()

    def chunk_choice(self, number: int, delta: Delta, reason: FinishReason | None) -> Json | None:
        chosen = () if delta.chosen is None else (delta.chosen,)
        log_probabilities = self._log_probabilities(number, chosen)
        if not (delta.text or log_probabilities or reason):
            return None
        return {
            "index": number,
            "text": delta.text,
            "logprobs": log_probabilities,
            "finish_reason": reason,
        }

    def _echo(self, number: int) -> str:
        return self._echoes[number // self._n] if self._echoes else ""

    def _log_probabilities(self, number: int, chosen: Sequence[Chosen]) -> Json | None:
        if self.writings[number].request.top_log_probabilities is None or not chosen:
            return None
        tokens = [self.token_text(each.token) for each in chosen]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(number, len(self._echo(number))))
            self._offsets[number] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.log_probability for each in chosen],
            "top_logprobs": [
                # In reverse: of several tokens with the same text, the most likely one counts.
                {self.token_text(token): value for token, value in reversed(each.top)}
                for each in chosen
            ],
            "text_offset": offsets,
        }


@final
class Chat(OpenAIAnswer):
    """An answer of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatRequest) -> None:
        check_length(model, sum(len(message.text) for message in body.messages))
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        limit = body.max_completion_tokens or body.max_tokens
        self._hits: Sequence[Hit] = ()
        if model.passages is None:
            prompt = tuple(model.codec.answer_prompt(messages))
        else:
            fitting = _with_passages(
                model, model.passages, messages, _ANSWER_TOKENS if limit is None else limit
            )
            prompt, self._hits = tuple(fitting.tokens), fitting.hits
        top = (body.top_logprobs or 0) if body.logprobs else None
        requests = [
            TextRequest(prompt, limit, sampling, body.stops, top, body.beams)
            for sampling in samplings(body, body.n or 1)
        ]
        super().__init__(model, requests, [prompt], body)

    def further_keys(self) -> Json:
        if self.model.passages is None:
            return {}
        passages = [{"score": hit.score, **dataclasses.asdict(hit.passage)} for hit in self._hits]
        return {"passages": passages}

    def choice(self, number: int, text: Text) -> Json:
        return {
            "index": number,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": self._log_probabilities(number, text.chosen),
            "finish_reason": text.reason,
        }

    def first_choices(self, number: int) -> Sequence[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunk_choice(self, number: int, delta: Delta, reason: FinishReason | None) -> Json | None:
        chosen = () if delta.chosen is None else (delta.chosen,)
        log_probabilities = self._log_probabilities(number, chosen)
        if not (delta.text or log_probabilities or reason):
            return None
        content = {"content": delta.text} if delta.text or log_probabilities else {}
        return {"index": number, "delta": content, "logprobs": log_probabilities, "finish_reason": reason}

    def _log_probabilities(self, number: int, chosen: Sequence[Chosen]) -> Json | None:
        if self.writings[number].request.top_log_probabilities is None or not chosen:
            return None
        return {
            "content": [
                self._entry(each.token, each.log_probability)
                | {"top_logprobs": [self._entry(*pair) for pair in each.top]}
                for each in chosen
            ],
            "refusal": None,
        }

    def _entry(self, token: int, log_probability: float | None) -> Json:
        text, found = self.model.tokens[token]
        return {"token": text, "logprob": log_probability, "bytes": None if found is None else list(found)}


def _with_passages(
    model: ServedModel, passages: PassagePrompts, messages: Sequence[dict[str, str]], new_tokens: int
) -> FittedPrompt:
    """Return the prompt of a conversation with passages before the last message of the user.

    Args:
        model: the model.
        passages: puts them there.
        messages: `role` and `content` of each message.
        new_tokens: tokens for which there is room after the prompt.

    Raises:
        DataError: if the user has no message; see also `PassagePrompts.prompt`.
    """
    place = next((n for n in reversed(range(len(messages))) if messages[n]["role"] == "user"), None)
    if place is None:
        raise DataError(
            "expected a message with the role user, which is the question; got none",
            where="messages",
            remedy="add the question as a message of the user",
        )

    def tokens_of(text: str) -> list[int]:
        return model.codec.answer_prompt(
            [*messages[:place], {"role": "user", "content": text}, *messages[place + 1 :]]
        )

    return passages.prompt(messages[place]["content"], tokens_of, model.worker.max_length + 1 - new_tokens)


@final
class CardAnswer(WrittenAnswer):
    """A list of texts: the answer to a request in the JSON of the Cerebras-GPT model card."""

    def __init__(self, model: ServedModel, body: CardRequest) -> None:
        params = body.params
        self._beginnings = body.input_data if params.return_full_text else [""] * len(body.input_data)
        prompts = [tuple(encoded(model, text)) for text in body.input_data]
        first = Sampling(
            params.temperature if params.do_sample else 0.0,
            params.top_k or None,
            params.top_p,
            _seed(params.seed),
            params.no_repeat_ngram_size,
        )
        requests = [
            TextRequest(prompt, params.max_new_tokens, sampling, beams=params.beams)
            for prompt, sampling in zip(prompts, _differently_seeded(first, len(prompts)), strict=True)
        ]
        super().__init__(model, requests, prompts)

    async def body(self) -> list[str]:
        texts = await self.texts()
        return [first + text.text for first, text in zip(self._beginnings, texts, strict=True)]


def samplings(body: TextSettings, count: int) -> list[Sampling]:
    """Return how each of `count` texts of a prompt is sampled. The first one has the seed of the request."""
    first = Sampling(
        1.0 if body.temperature is None else body.temperature,
        None if body.top_k is None or body.top_k <= 0 else body.top_k,
        body.top_p,
        _seed(body.seed),
        body.no_repeat_ngram_size,
    )
    return _differently_seeded(first, count)


def _differently_seeded(first: Sampling, count: int) -> list[Sampling]:
    """Return `first`, and the same settings with other seeds, `count` in all."""
    others = (dataclasses.replace(first, seed=derive_seed(first.seed, n)) for n in range(1, count))
    return [first, *others]


def _seed(asked: int | None) -> int:
    return secrets.randbits(63) if asked is None else asked
