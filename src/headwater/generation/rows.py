"""Requests with keys and values in memory: one row of a pass for a text, or one row for each beam."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from headwater.generation.beams import Beams
from headwater.generation.sampling import Chooser, Chosen

if TYPE_CHECKING:
    from headwater.generation.requests import Generation


@final
class Row:
    """A sequence with keys and values in memory.

    Args:
        cache: what the model keeps of the tokens that it has read.
        unread: the tokens that the model has not read.
    """

    def __init__(self, cache: Any, unread: Sequence[int]) -> None:
        self.cache = cache
        self.unread = unread


class Active(abc.ABC):
    """A request whose keys and values are in memory; each pass continues it.

    Attributes:
        generation: the request and its tokens.
        rows: its sequences.
    """

    def __init__(self, generation: Generation, cache: Any) -> None:
        self.generation = generation
        self.rows = [Row(cache, generation.request.prompt)]

    @property
    @abc.abstractmethod
    def takes_largest(self) -> bool:
        """True if `take` only needs the tokens with the largest logits."""

    @abc.abstractmethod
    def take(self, logits: Tensor, largest: Sequence[int]) -> None:
        """Continue the sequences, all of whose tokens the model has read.

        Args:
            logits: logits of the next token of each row, [rows, vocab]; not used if `takes_largest`.
            largest: if `takes_largest`, the token with the largest logit of each row.
        """

    def _append(self, chosen: Chosen) -> None:
        """Append a token to the text, and end the generation if it is the last one."""
        generation, request = self.generation, self.generation.request
        generation.output.append(chosen.token)
        ended = request.receive(chosen) or chosen.token in request.ends
        if generation.reason is None:  # the receiver may have cancelled it
            if ended:
                generation.reason = "stop"
            elif len(generation.output) == request.max_new_tokens:
                generation.reason = "length"


@final
class ActiveText(Active):
    """A request whose tokens are chosen one after another."""

    def __init__(self, generation: Generation, cache: Any) -> None:
        super().__init__(generation, cache)
        request = generation.request
        self._chooser = Chooser(request.sampling, request.top_log_probabilities)

    @property
    def takes_largest(self) -> bool:
        return self._chooser.takes_largest

    def take(self, logits: Tensor, largest: Sequence[int]) -> None:
        if self.takes_largest:
            chosen = Chosen(largest[0])
        else:
            before = (*self.generation.request.prompt, *self.generation.output)
            chosen = self._chooser.choose(logits[0].float().cpu(), before)
        self.rows[0].unread = (chosen.token,)
        self._append(chosen)


@final
class ActiveBeams(Active):
    """A request with beam search. Its text is known at the end of the search."""

    takes_largest = False

    def __init__(self, generation: Generation, cache: Any) -> None:
        super().__init__(generation, cache)
        request = generation.request
        assert request.beams is not None, "a request with beam search"
        self._beams = Beams(request.prompt, request.max_new_tokens, request.ends, request.beams)

    def take(self, logits: Tensor, largest: Sequence[int]) -> None:
        parents = self._beams.advance(logits)
        if not self._beams.done:
            self._continue(parents)
            return
        for token in self._beams.best:
            self._append(Chosen(token))
            if self.generation.reason is not None:
                return
        self.generation.reason = "length"  # no text has ended

    def _continue(self, parents: Sequence[int]) -> None:
        """Make the rows of the next pass, each with the keys and values of its parent."""
        kept = {parent: self.rows[parent].cache for parent in parents}
        # Caches without children end here, before others are copied: memory has room for `num_beams` caches.
        self.rows = []
        taken: set[int] = set()
        for parent, text in zip(parents, self._beams.texts, strict=True):
            cache = kept[parent].fork() if parent in taken else kept[parent]
            taken.add(parent)
            self.rows.append(Row(cache, text[-1:]))
