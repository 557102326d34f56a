"""Continuous batching: requests join and leave between passes over the weights of a model."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, final

import torch
from torch import Tensor

from headwater.core.errors import DataError, HeadwaterError, NonFiniteError
from headwater.generation.sampling import Chooser, Chosen, Sampling
from headwater.models.sequences import LanguageModel, Piece, SequenceCache

ACTIVE_PER_ROW = 4
"""Sequences that are computed at once for each sequence of full length that has memory."""

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a generation has ended: by an end token or its receiver, at the most tokens, or because of the user."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Memory that a plan allows for generation.

    Attributes:
        cache_tokens: tokens whose keys and values are in memory at once, over all sequences.
        pass_tokens: most new tokens that are read in one pass over the weights.
        active: most sequences that are computed at once; at most `pass_tokens`.
        length: most tokens whose keys and values one request may need; the model's positions if not given.
    """

    cache_tokens: int
    pass_tokens: int
    active: int
    length: int | None = None


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A prompt that a model continues.

    Attributes:
        prompt: token ids; at least one.
        max_new_tokens: most tokens to generate; 0: none, and the generation has ended before its first pass.
        sampling: how tokens are chosen.
        ends: ids of the tokens that end the text.
        receive: called with each token; returns True to end the text after it.
        top_log_probabilities: see `Chooser`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    receive: Callable[[Chosen], bool] = lambda chosen: False
    top_log_probabilities: int | None = None

    @property
    def cache_tokens(self) -> int:
        """Most tokens whose keys and values are kept. The model never reads the last new token."""
        return len(self.prompt) + self.max_new_tokens - 1


@final
class Generation:
    """A request and the tokens that were generated for it.

    Attributes:
        request: the request.
        output: the generated tokens; the last one may be an end token.
        reason: why the generation has ended; `None` until then.
        error: the error that ended this generation alone, if one did; `reason` is then `cancelled`.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.output: list[int] = []
        self.reason: FinishReason | None = None if request.max_new_tokens else "length"
        self.error: HeadwaterError | None = None

    @property
    def text_tokens(self) -> list[int]:
        """The generated tokens without the end token."""
        ended = self.output and self.output[-1] in self.request.ends
        return self.output[:-1] if ended else self.output


@final
class _Active:
    """A sequence with keys and values in memory."""

    def __init__(self, generation: Generation, cache: SequenceCache) -> None:
        request = generation.request
        self.generation = generation
        self.cache = cache
        self.unread: Sequence[int] = request.prompt
        self.chooser = Chooser(request.sampling, request.top_log_probabilities)

    def take(self, chosen: Chosen) -> None:
        """Append a token, and end the generation if it is the last one."""
        generation, request = self.generation, self.generation.request
        generation.output.append(chosen.token)
        self.unread = (chosen.token,)
        ended = request.receive(chosen) or chosen.token in request.ends
        if generation.reason is None:  # the receiver may have cancelled it
            if ended:
                generation.reason = "stop"
            elif len(generation.output) == request.max_new_tokens:
                generation.reason = "length"


@final
class Batcher:
    """Generates tokens for many requests. Each pass over the weights serves all sequences.

    A request waits until the keys and values of its longest possible text fit into memory. Requests begin in
    the order in which they were added. Not for use by several threads at once.

    Args:
        model: the model, in eval mode.
        device: device of the model.
        limits: memory for keys, values and activations.
        computing: returns a context in which the model can be called.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | str,
        limits: Limits,
        computing: Callable[[], AbstractContextManager[object]] = torch.no_grad,
    ) -> None:
        self.limits = limits
        self._model = model
        self._device = torch.device(device)
        self._computing = computing
        self._waiting: deque[Generation] = deque()
        self._active: list[_Active] = []

    @property
    def waiting(self) -> int:
        """Number of requests that wait for memory."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of sequences that are computed."""
        return len(self._active)

    @property
    def used_cache_tokens(self) -> int:
        """Tokens for which keys and values have memory."""
        return sum(each.generation.request.cache_tokens for each in self._active)

    @property
    def max_length(self) -> int:
        """Most tokens whose keys and values one request may need."""
        limits = self.limits
        return min(self._model.max_length, limits.cache_tokens, limits.length or self._model.max_length)

    def check(self, prompt: int, max_new_tokens: int) -> None:
        """Check that a request fits into the model.

        Args:
            prompt: tokens of the prompt.
            max_new_tokens: most tokens to generate.

        Raises:
            DataError: if the prompt is empty, or it does not fit together with the new tokens.
        """
        room = max(self.max_length - prompt + 1, 0)  # + 1: the model never reads the last new token
        if prompt == 0:
            raise DataError("the prompt is empty", remedy="begin it with at least one token")
        if max_new_tokens < 0:
            what = f"expected max_new_tokens of at least 0, got {max_new_tokens}"
            raise DataError(what, where="max_new_tokens", remedy="request 0 (only the prompt) or more")
        if max_new_tokens > room:
            raise DataError(
                f"a prompt of {prompt} tokens and {max_new_tokens} new tokens do not fit into"
                f" the {self.max_length} positions of the model",
                remedy=f"request at most {room} new tokens, or shorten the prompt"
                if room
                else f"shorten the prompt to at most {self.max_length} tokens",
            )

    def add(self, request: GenerationRequest) -> Generation:
        """Put a request into the queue.

        Raises:
            DataError: see `check`.
        """
        generation = self.prepared(request)
        self.enter(generation)
        return generation

    def prepared(self, request: GenerationRequest) -> Generation:
        """Return the generation of a request for `enter`. Any thread may call this.

        Raises:
            DataError: see `check`.
        """
        self.check(len(request.prompt), request.max_new_tokens)
        return Generation(request)

    def enter(self, generation: Generation) -> None:
        """Put a prepared generation into the queue, unless it has ended already."""
        if generation.reason is None:
            self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a generation, and release its memory. A generation that has ended is not changed."""
        if generation.reason is None:
            generation.reason = "cancelled"
        self._release()

    def step(self) -> None:
        """Compute one pass over the weights: a token for each sequence, and parts of new prompts.

        A call without requests does nothing.
        """
        self._admit()
        if not self._active:
            return
        counts = divided([len(each.unread) for each in self._active], self.limits.pass_tokens)
        chosen = [(each, count) for each, count in zip(self._active, counts, strict=True) if count]
        with self._computing():
            logits = self._model.next_logits([self._piece(each, count) for each, count in chosen])
        complete = []
        for row, (each, count) in enumerate(chosen):
            each.unread = each.unread[count:]
            if not each.unread:
                complete.append((row, each))
        self._take(complete, logits)
        self._release()

    def run(self, done: Callable[[int], None] = lambda ended: None) -> None:
        """Compute until all requests have ended.

        Args:
            done: called after each pass with the number of requests that have not ended.

        Raises:
            NonFiniteError: at the end, if a request had logits that are not finite.
        """
        generations = [*(each.generation for each in self._active), *self._waiting]
        while self._waiting or self._active:
            self.step()
            done(self.waiting + self.active)
        for generation in generations:
            if generation.error is not None:
                raise generation.error

    def _admit(self) -> None:
        """Begin as many of the first waiting requests as have memory."""
        free = self.limits.cache_tokens - self.used_cache_tokens
        while self._waiting and self.active < self.limits.active:
            size = self._waiting[0].request.cache_tokens
            if size > free:
                break
            free -= size
            self._active.append(_Active(self._waiting.popleft(), self._model.new_cache(size)))

    def _piece(self, each: _Active, count: int) -> Piece:
        return Piece(torch.tensor(each.unread[:count], device=self._device), each.cache)

    def _take(self, complete: Sequence[tuple[int, _Active]], logits: Tensor) -> None:
        """Choose the next token of the sequences that have read all their tokens, each from a row."""
        greedy = any(each.chooser.takes_largest for _, each in complete)
        largest = logits.argmax(-1).tolist() if greedy else []
        # The largest logit is NaN if one of them is.
        finite = logits.amax(-1).isfinite().tolist()
        for row, each in complete:
            if not finite[row]:
                each.generation.reason = "cancelled"
                each.generation.error = NonFiniteError(
                    "expected finite logits for the next token, got NaN or infinity",
                    remedy="check the weights of the model, or use another dtype",
                )
            elif each.chooser.takes_largest:
                each.take(Chosen(largest[row]))
            else:
                request = each.generation.request
                before = (*request.prompt, *each.generation.output)
                each.take(each.chooser.choose(logits[row].float().cpu(), before))

    def _release(self) -> None:
        self._active = [each for each in self._active if each.generation.reason is None]
        self._waiting = deque(each for each in self._waiting if each.reason is None)


def divided(unread: Sequence[int], limit: int) -> list[int]:
    """Return how many tokens of each sequence are read in the next pass.

    Every sequence that has one unread token reads it. The others share what is left, the first ones first.

    Args:
        unread: tokens of each sequence that the model has not read; at least one.
        limit: most tokens of a pass; at least the number of sequences.
    """
    left = limit - sum(count == 1 for count in unread)
    counts = []
    for count in unread:
        counts.append(1 if count == 1 else min(count, left))
        left -= 0 if count == 1 else counts[-1]
    return counts
