"""The choice of the next token from the logits of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.core.seeding import derive_seed


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for choosing tokens.

    Attributes:
        temperature: divisor of the logits; 0: always take the most likely token.
        top_k: sample only among the k most likely tokens.
        top_p: sample only among the smallest set of most likely tokens whose probability reaches `top_p`.
        seed: seed of the random stream.
        no_repeat_ngram_size: a token that would repeat a sequence of this many tokens is never chosen; 0: no
            limit.

    Raises:
        ConfigError: if a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        # Not `temperature < 0`: NaN must be refused too.
        if not self.temperature >= 0:
            what = f"expected temperature of at least 0, got {self.temperature}"
            raise ConfigError(what, where="temperature", remedy="use 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            what = f"expected top_k of at least 1, got {self.top_k}"
            raise ConfigError(what, where="top_k", remedy="use 1 or more, or remove it")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            what = f"expected top_p above 0 and at most 1, got {self.top_p}"
            raise ConfigError(what, where="top_p", remedy="use, for example, 0.9")
        if self.no_repeat_ngram_size < 0:
            what = f"expected no_repeat_ngram_size of at least 0, got {self.no_repeat_ngram_size}"
            raise ConfigError(what, where="no_repeat_ngram_size", remedy="use 0 (no limit) or more")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A token that was chosen.

    Attributes:
        token: the token.
        log_probability: natural logarithm of its probability before temperature, `top_k` and `top_p`; `None`
            if it was not requested.
        top: the most likely tokens with their log-probabilities, the most likely first.
    """

    token: int
    log_probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@final
class Chooser:
    """Chooses the tokens of one sequence. The same settings and logits produce the same tokens.

    Args:
        sampling: how tokens are chosen.
        top_log_probabilities: number of most likely tokens in each `Chosen`; `None`: no log-probabilities.
    """

    def __init__(self, sampling: Sampling, top_log_probabilities: int | None = None) -> None:
        self._sampling = sampling
        self._top = top_log_probabilities
        self._generator: torch.Generator | None = None  # made at the first draw

    @property
    def takes_largest(self) -> bool:
        """True if the token with the largest logit is chosen, and nothing else is asked for."""
        return (
            self._sampling.temperature == 0 and self._top is None and not self._sampling.no_repeat_ngram_size
        )

    def choose(self, logits: Tensor, before: Sequence[int]) -> Chosen:
        """Choose a token.

        Args:
            logits: logits of the next token, fp32 [vocab] on the CPU.
            before: the tokens of the sequence so far, with the prompt.
        """
        forbidden = repeating(before, self._sampling.no_repeat_ngram_size)
        # If every token would repeat something, all are allowed.
        allowed = logits
        if 0 < len(forbidden) < len(logits):
            allowed = logits.index_fill(0, torch.tensor(forbidden), -torch.inf)
        token = self._drawn(allowed)
        if self._top is None:
            return Chosen(token)
        log_probabilities = logits.log_softmax(-1)
        values, tokens = log_probabilities.topk(min(self._top, len(logits)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return Chosen(token, float(log_probabilities[token]), top)

    def _drawn(self, logits: Tensor) -> int:
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        # Quotients must be finite, also for a temperature that is 0 in fp32.
        logits = (logits - logits.max()) / max(sampling.temperature, 1e-6)
        if sampling.top_k is not None and sampling.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
        if sampling.top_p is not None and sampling.top_p < 1:
            logits = _keep_top_p(logits, sampling.top_p)
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(derive_seed(sampling.seed, "generate"))
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))


def repeating(tokens: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete a sequence of `size` tokens that `tokens` already has."""
    if not 0 < size <= len(tokens):
        return []
    last = list(tokens[len(tokens) - size + 1 :])
    starts = range(len(tokens) - size + 1)
    found = {tokens[start + size - 1] for start in starts if list(tokens[start : start + size - 1]) == last}
    return sorted(found)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Return `logits` [vocab] with -inf outside of the nucleus (nucleus sampling, arXiv:1904.09751)."""
    ordered, order = logits.softmax(-1).sort(descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # the more likely tokens already reach top_p
    outside[0] = False  # otherwise no token would be left if `top_p` is 0 in fp32
    return logits.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), -torch.inf)
