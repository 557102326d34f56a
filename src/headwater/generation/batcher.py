"""Continuous batching: requests join and leave between passes over the weights of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from headwater.core.errors import NonFiniteError
from headwater.generation.requests import Generation, GenerationRequest, Limits
from headwater.generation.room import Room
from headwater.generation.rows import Active, ActiveBeams, ActiveText, Row
from headwater.models.few_rows import FewRows
from headwater.models.sequences import LanguageModel, Piece

ACTIVE_PER_ROW = 4
"""Sequences that are computed at once for each sequence of full length that has memory."""


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

    Attributes:
        limits: as given.
        room: the room for one request.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: torch.device | str,
        limits: Limits,
        computing: Callable[[], AbstractContextManager[object]] = torch.no_grad,
    ) -> None:
        self.limits = limits
        self.room = Room.of(limits, model.max_length)
        self._model = model
        self._device = torch.device(device)
        self._computing = computing
        self._few_rows = FewRows(model, self._device)
        self._waiting: deque[Generation] = deque()
        self._active: list[Active] = []

    @property
    def waiting(self) -> int:
        """Number of requests that wait for memory."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of sequences that are computed."""
        return sum(each.generation.request.num_rows for each in self._active)

    @property
    def used_cache_tokens(self) -> int:
        """Tokens for which keys and values have memory."""
        return sum(each.generation.request.cache_tokens for each in self._active)

    def add(self, request: GenerationRequest) -> Generation:
        """Put a request into the queue.

        Raises:
            DataError: see `Room.check`.
        """
        generation = self.prepared(request)
        self.enter(generation)
        return generation

    def prepared(self, request: GenerationRequest) -> Generation:
        """Return the generation of a request for `enter`. Any thread may call this.

        Raises:
            DataError: see `Room.check`.
        """
        self.room.check(request)
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
        rows = [row for each in self._active for row in each.rows]
        counts = divided([len(row.unread) for row in rows], self.limits.pass_tokens)
        chosen = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        with self._computing(), self._few_rows.of(sum(counts)):
            logits = self._model.next_logits([self._piece(row, count) for row, count in chosen])
        for row, count in chosen:
            row.unread = row.unread[count:]
        places = {row: place for place, (row, _) in enumerate(chosen)}
        # Rows of beams have one unread token each, so a pass reads all of them.
        complete = [each for each in self._active if not any(row.unread for row in each.rows)]
        self._take([(each, [places[row] for row in each.rows]) for each in complete], logits)
        self._release()

    def run(self, after_pass: Callable[[int], None] = lambda unfinished: None) -> None:
        """Compute until all requests have ended.

        Args:
            after_pass: called after each pass with the number of waiting requests and active sequences.

        Raises:
            NonFiniteError: at the end, if a request had logits that are not finite.
        """
        generations = [*(each.generation for each in self._active), *self._waiting]
        while self._waiting or self._active:
            self.step()
            after_pass(self.waiting + self.active)
        for generation in generations:
            if generation.error is not None:
                raise generation.error

    def _admit(self) -> None:
        """Begin as many of the first waiting requests as have memory."""
        free = self.limits.cache_tokens - self.used_cache_tokens
        while self._waiting:
            request = self._waiting[0].request
            if request.cache_tokens > free or self.active + request.num_rows > self.limits.active:
                break
            free -= request.cache_tokens
            kind = ActiveText if request.beams is None else ActiveBeams
            self._active.append(kind(self._waiting.popleft(), self._model.new_cache(request.row_tokens)))

    def _piece(self, row: Row, count: int) -> Piece:
        return Piece(torch.tensor(row.unread[:count], device=self._device), row.cache)

    def _take(self, complete: Sequence[tuple[Active, list[int]]], logits: Tensor) -> None:
        """Continue the requests that have read all their tokens, each with some rows of the logits."""
        greedy = any(each.takes_largest for each, _ in complete)
        largest = logits.argmax(-1).tolist() if greedy else []
        # The largest logit is NaN if one of them is.
        finite = logits.amax(-1).isfinite().tolist()
        for each, rows in complete:
            if not all(finite[row] for row in rows):
                each.generation.reason = "cancelled"
                each.generation.error = NonFiniteError(
                    "expected finite logits for the next token, got NaN or infinity",
                    remedy="check the weights of the model, or use another dtype",
                )
            elif each.takes_largest:
                each.take(logits[:0], [largest[row] for row in rows])
            else:
                each.take(logits[rows], ())

    def _release(self) -> None:
        self._active = [each for each in self._active if each.generation.reason is None]
        self._waiting = deque(each for each in self._waiting if each.reason is None)


def divided(unread: Sequence[int], limit: int) -> list[int]:
    """Return how many tokens of each sequence are read in the next pass.

    Every sequence that has one unread token reads it. The others share what is left, the first ones first.

    Args:
        unread: tokens of each sequence that the model has not read; at least one.
        limit: largest number of tokens of a pass; at least the number of sequences.
    """
    left = limit - sum(count == 1 for count in unread)
    counts = []
    for count in unread:
        counts.append(1 if count == 1 else min(count, left))
        left -= 0 if count == 1 else counts[-1]
    return counts
