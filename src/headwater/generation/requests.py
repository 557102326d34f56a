"""Requests for generation, the tokens that were generated for them, and the memory that all may use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, final

from headwater.core.errors import HeadwaterError
from headwater.generation.beams import BeamSearch
from headwater.generation.sampling import Chosen, Sampling

FinishReason = Literal["stop", "length", "cancelled"]
"""Why a generation has ended: an end token or its receiver, the limit of tokens, or the user."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Memory that a plan allows for generation.

    Attributes:
        cache_tokens: tokens whose keys and values are in memory at once, over all sequences.
        pass_tokens: largest number of new tokens that are read in one pass over the weights.
        active: largest number of sequences that are computed at once; at most `pass_tokens`.
        length: largest number of tokens whose keys and values one request may need; the model's positions if
            not given.
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
        max_new_tokens: largest number of tokens to generate; with 0 a generation ends before its first pass.
        sampling: how tokens are chosen.
        ends: ids of the tokens that end the text.
        receive: called with each token; returns True to end the text after it.
        top_log_probabilities: see `Chooser`.
        beams: search with beams instead of choosing tokens by `sampling`; `receive` gets the tokens at the
            end of the search, without log-probabilities.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    receive: Callable[[Chosen], bool] = lambda chosen: False
    top_log_probabilities: int | None = None
    beams: BeamSearch | None = None

    @property
    def num_rows(self) -> int:
        """Sequences that are computed at once."""
        return 1 if self.beams is None else self.beams.num_beams

    @property
    def row_tokens(self) -> int:
        """Most tokens of a sequence whose keys and values are kept. The last new token is never read."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def cache_tokens(self) -> int:
        """Most tokens of all sequences whose keys and values are kept."""
        return self.num_rows * self.row_tokens


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
