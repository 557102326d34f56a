"""The interface of models that continue texts: they read new tokens of many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Piece(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        tokens: the tokens, int64 [n], at least one.
        cache: what the model keeps of the tokens before them; extended by the forward that reads them.
    """

    tokens: Tensor
    cache: Any


class SequenceCache(Protocol):
    """State that a model keeps of the tokens that it has read of one sequence."""

    @property
    def length(self) -> int:
        """Tokens that were read."""

    def skip(self, count: int) -> int:
        """Count tokens as read, for a dry run. Return how many; fewer than `count` if this is impossible."""

    def fork(self) -> Any:
        """Return a copy, for another continuation of the same tokens."""


class LanguageModel(Protocol):
    """A model that continues texts."""

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence in tokens."""

    def new_cache(self, max_length: int) -> Any:
        """Return an empty `SequenceCache` for a sequence of up to `max_length` tokens."""

    def next_logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the logits [pieces, vocab] of the token after the last one of each piece."""


def side_by_side(pieces: Sequence[Piece]) -> Tensor:
    """Return the tokens of all pieces, one after another, [1, tokens]."""
    return torch.cat([piece.tokens for piece in pieces])[None]


def positions(pieces: Sequence[Piece]) -> Tensor:
    """Return the position of each token of `side_by_side` in its sequence, before it is read, [tokens]."""
    device = pieces[0].tokens.device
    starts = [(piece.cache.length, len(piece.tokens)) for piece in pieces]
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in starts])


def last_places(pieces: Sequence[Piece]) -> Tensor:
    """Return the place in `side_by_side` of the last token of each piece, [pieces]."""
    counts = torch.tensor([len(piece.tokens) for piece in pieces], device=pieces[0].tokens.device)
    return counts.cumsum(0) - 1


def read_largest(model: LanguageModel, input_ids: Tensor, pass_tokens: int, active_per_row: int) -> Tensor:
    """Run the largest pass of a generation, for a dry run. Return its logits.

    The caches of all sequences hold as many tokens as `input_ids` has. One sequence has the full length, and
    the others share the remaining tokens.

    Args:
        model: the model.
        input_ids: tokens, [batch, seq].
        pass_tokens: largest number of new tokens of a pass.
        active_per_row: sequences that are computed at once, for each row of the batch.
    """
    rows, length = input_ids.shape
    others = rows * active_per_row - 1
    each = max(1, (rows - 1) * length // others) if others else 0
    lengths = [length] + [each] * others
    # Every sequence reads at least one token, and the first ones read as many as the pass has left.
    left = max(0, pass_tokens - len(lengths))
    pieces = []
    for full in lengths:
        count = min(full, left + 1)
        left -= count - 1
        cache = model.new_cache(full)
        start = cache.skip(full - count)
        pieces.append(Piece(input_ids.flatten()[: full - start], cache))
    return model.next_logits(pieces)
