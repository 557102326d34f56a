"""Requests for log-likelihoods, and their division into passes over the weights of a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from headwater.core.errors import DataError


@dataclasses.dataclass(frozen=True)
class Request:
    """A continuation whose log-likelihood after a context is requested.

    Attributes:
        context: token ids before the continuation; at least one.
        continuation: token ids that are scored; at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that the model reads: all but the last, which is only predicted."""
        return self.context + self.continuation[:-1]

    def cut(self, max_length: int) -> Request:
        """Return the request without the first tokens of a context that is too long for the model."""
        excess = len(self.inputs) - max_length
        return self if excess <= 0 else dataclasses.replace(self, context=self.context[excess:])


@dataclasses.dataclass(frozen=True)
class Score:
    """The result of a request.

    Attributes:
        log_likelihood: natural logarithm of the probability of the continuation.
        is_greedy: True if each token of the continuation is the most likely one at its place.
    """

    log_likelihood: float
    is_greedy: bool


Pass = Mapping[tuple[int, ...], Sequence[int]]
"""Sequences that the model reads in one pass over its weights, each with the numbers of its requests."""


def passes(requests: Sequence[Request], max_tokens: int, ranks: int = 1) -> Iterator[Pass]:
    """Divide requests into passes, the longest sequences first.

    Requests that read the same tokens share a sequence, such as answers of one token to the same question.
    A pass is padded to its longest sequence, so neighbours in length are put together. Several ranks share
    a pass; see `part_of_pass`.

    Args:
        requests: the requests.
        max_tokens: largest number of tokens of a pass on each rank, including padding; one sequence is never
            divided.
        ranks: number of ranks that compute a pass.

    Yields:
        The passes. Every request is in one of them.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        sharing.setdefault(request.inputs, []).append(number)
    longest_first = sorted(sharing, key=lambda tokens: (-len(tokens), tokens))
    while longest_first:
        count = ranks * max(1, max_tokens // len(longest_first[0]))
        yield {tokens: sharing[tokens] for tokens in longest_first[:count]}
        del longest_first[:count]


def part_of_pass(each: Pass, rank: int, ranks: int) -> Pass:
    """Return the sequences of a pass that a rank computes: every n-th one of n ranks.

    Each rank gets sequences of all lengths. Parts differ by at most one sequence, and may be empty.
    """
    return dict(itertools.islice(each.items(), rank, None, ranks))


def windows(tokens: Sequence[int], prefix: int, max_length: int) -> Iterator[Request]:
    """Divide a text into requests that predict each of its tokens once.

    Every request has as much context as the model can read. The division is that of lm-evaluation-harness.

    Args:
        tokens: token ids of the text.
        prefix: id of the token before the text.
        max_length: largest number of tokens that the model reads at once.
    """
    whole = (prefix, *tokens)
    for start in range(0, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        # In `whole`, the token with number `start` is at `start + 1`.
        yield Request(tuple(whole[max(0, end - max_length) : start + 1]), tuple(tokens[start:end]))


def check_ids(requests: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Check that all token ids are in the vocabulary of the model.

    Raises:
        DataError: if a token id is not in the vocabulary.
    """
    largest = max((max(tokens) for tokens in requests if tokens), default=0)
    if largest >= vocab_size:
        raise DataError(
            "the tokenizer does not fit the model: "
            f"expected token ids < vocab_size {vocab_size}, got {largest}",
            where="--tokenizer",
            remedy="name the tokenizer with which the model was trained",
        )
