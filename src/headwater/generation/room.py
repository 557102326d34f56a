"""The room for one request: whether a prompt and its new tokens fit, and what to change if they do not."""

from __future__ import annotations

import dataclasses
from typing import final

from headwater.core.errors import DataError
from headwater.generation.requests import GenerationRequest, Limits


@final
@dataclasses.dataclass(frozen=True)
class Room:
    """The room for one request.

    Attributes:
        max_length: most tokens whose keys and values one request may need.
        cache_tokens: most tokens of all sequences whose keys and values are in memory.
        active: most sequences that are computed at once.
    """

    max_length: int
    cache_tokens: int
    active: int

    @classmethod
    def of(cls, limits: Limits, positions: int) -> Room:
        """Return the room that `limits` leave in a model with this number of positions."""
        max_length = min(positions, limits.cache_tokens, limits.length or positions)
        return cls(max_length, limits.cache_tokens, limits.active)

    def after(self, prompt_tokens: int) -> int:
        """Return the most new tokens that fit after a prompt."""
        return max(self.max_length - prompt_tokens + 1, 0)  # + 1: the model never reads the last new token

    def check(self, request: GenerationRequest) -> None:
        """Check that a request fits into the model.

        Raises:
            DataError: if the prompt is empty, it does not fit together with the new tokens, or there are more
                beams than sequences that may be computed at once.
        """
        prompt, max_new_tokens = len(request.prompt), request.max_new_tokens
        if prompt == 0:
            raise DataError("the prompt is empty", where="prompt", remedy="write at least one token")
        if max_new_tokens < 0:
            what = f"expected max_new_tokens of at least 0, got {max_new_tokens}"
            raise DataError(what, where="max_new_tokens", remedy="request 0 (only the prompt) or more")
        if max_new_tokens > self.after(prompt):
            raise DataError(
                f"a prompt of {prompt} tokens and {max_new_tokens} new tokens do not fit into"
                f" the {self.max_length} positions of the model",
                remedy=self._remedy(prompt, max_new_tokens),
            )
        fitting = min(self.active, self.cache_tokens // max(request.row_tokens, 1))
        if request.num_rows > fitting:
            raise DataError(
                f"the keys and values of {request.num_rows} beams of {request.row_tokens} tokens do not fit",
                where="num_beams",
                remedy=f"use at most {fitting} beams, fewer tokens, or a larger batch size",
            )

    def _remedy(self, prompt_tokens: int, max_new_tokens: int) -> str:
        """Return the changes with which a prompt and new tokens that do not fit would fit."""
        if room := self.after(prompt_tokens):
            return f"request at most {room} new tokens, or shorten the prompt"
        # The rule is symmetric: the same number of positions is left for a prompt.
        if longest := self.after(max_new_tokens):
            return f"shorten the prompt to at most {longest} tokens"
        return f"shorten the prompt and request fewer new tokens, together at most {self.max_length + 1}"
