"""Beam search: the most likely continuations of one prompt are continued together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.generation.sampling import repeating

LARGEST_NUM_BEAMS = 256
"""Most beams of one request."""

_NEVER = -1e9
"""Added to the score of a text that must not be chosen. The transformers library has the same number."""


LARGEST_PENALTY = 50
"""Largest `length_penalty`. The score of a text is divided by its length to this power, which must not
overflow for a long text."""


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Settings of beam search, with the meaning that they have in the transformers library.

    Attributes:
        num_beams: texts that are continued at once; at least 2.
        early_stopping: True: stop when `num_beams` texts have ended. False: stop when the best
            unfinished text has a lower score than all of them. "never": the same, with the score that the
            unfinished text would have at the full length.
        length_penalty: the score of a text is the sum of the log-probabilities of its tokens, divided by
            their number to this power.
        no_repeat_ngram_size: see `Sampling`.

    Raises:
        ConfigError: if a setting is out of range.
    """

    num_beams: int
    early_stopping: bool | Literal["never"] = False
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.num_beams <= LARGEST_NUM_BEAMS:
            what = f"expected num_beams from 2 to {LARGEST_NUM_BEAMS}, got {self.num_beams}"
            raise ConfigError(what, where="num_beams", remedy="use, for example, 4")
        if not -LARGEST_PENALTY <= self.length_penalty <= LARGEST_PENALTY:
            limits = f"from -{LARGEST_PENALTY} to {LARGEST_PENALTY}"
            what = f"expected length_penalty {limits}, got {self.length_penalty}"
            raise ConfigError(what, where="length_penalty", remedy="use, for example, 1.0")
        if self.no_repeat_ngram_size < 0:
            what = f"expected no_repeat_ngram_size of at least 0, got {self.no_repeat_ngram_size}"
            raise ConfigError(what, where="no_repeat_ngram_size", remedy="use 0 (no limit) or more")


@final
class Beams:
    """The texts of one beam search. Has no model: `advance` gets the logits.

    The search takes the same steps as that of the transformers library, with the same fp32 arithmetic.

    Args:
        prompt: tokens before the texts.
        max_new_tokens: largest number of tokens of a text.
        ends: ids of the tokens that end a text.
        settings: the settings.

    Attributes:
        texts: the tokens of the unfinished texts; before the first step a single text without tokens.
        done: True if the search has ended.
    """

    def __init__(
        self, prompt: Sequence[int], max_new_tokens: int, ends: frozenset[int], settings: BeamSearch
    ) -> None:
        self.texts: list[list[int]] = [[]]
        self.done = False
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._ends = ends
        self._settings = settings
        self._scores = torch.full((settings.num_beams,), _NEVER)
        self._scores[0] = 0  # the first step has one text
        self._ended_texts: list[list[int]] = [[]] * settings.num_beams
        self._ended_scores = torch.full((settings.num_beams,), _NEVER)
        self._has_ended = torch.zeros(settings.num_beams, dtype=torch.bool)

    @property
    def best(self) -> list[int]:
        """The ended text with the best score."""
        return self._ended_texts[0]

    def advance(self, logits: Tensor) -> list[int]:
        """Continue each text by a token.

        Args:
            logits: logits of the next token of each text, [texts, vocab].

        Returns:
            For each of the new texts, the number of the text that it continues.
        """
        num_beams = self._settings.num_beams
        best, parents, tokens = self._candidates(logits)
        texts = [[*self.texts[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        full = len(texts[0]) == self._max_new_tokens
        ended = torch.tensor([full or token in self._ends for token in tokens])
        unfinished = best + ended * _NEVER
        following = unfinished.topk(num_beams).indices
        self._scores = unfinished[following]
        self._keep_ended(texts, best, ended)
        self.texts = [texts[place] for place in following.tolist()]
        self.done = bool(ended.all()) or self._is_decided()
        return [parents[place] for place in following.tolist()]

    def _candidates(self, logits: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return the best continuations: their scores, the number of the text, and the token."""
        log_probabilities = logits.float().log_softmax(-1)
        for row, text in enumerate(self.texts):
            forbidden = repeating((*self._prompt, *text), self._settings.no_repeat_ngram_size)
            log_probabilities[row, forbidden] = -torch.inf
        vocabulary = logits.shape[-1]
        scores = log_probabilities + self._scores.to(logits.device)[:, None]
        # At least `num_beams` unfinished texts are left, even if all end tokens are among the best.
        count = max(2, 1 + len(self._ends)) * self._settings.num_beams
        values, places = scores.flatten().topk(min(count, scores.numel()))
        rows = (places // vocabulary).clamp_max(len(self.texts) - 1)
        return values.cpu(), rows.tolist(), (places % vocabulary).tolist()

    def _keep_ended(self, texts: list[list[int]], scores: Tensor, ended: Tensor) -> None:
        """Keep the best of the ended texts, and of those that end now and are among the first ones."""
        num_beams = self._settings.num_beams
        ended = ended & (torch.arange(len(texts)) < num_beams)
        scores = scores / len(texts[0]) ** self._settings.length_penalty + ~ended * _NEVER
        merged = torch.cat([self._ended_scores, scores])
        chosen = merged.topk(num_beams).indices
        together = [*self._ended_texts, *texts]
        self._ended_texts = [together[place] for place in chosen.tolist()]
        self._ended_scores = merged[chosen]
        self._has_ended = torch.cat([self._has_ended, ended])[chosen]

    def _is_decided(self) -> bool:
        """True if unfinished texts cannot replace an ended one."""
        settings = self._settings
        if settings.early_stopping is True and bool(self._has_ended.all()):
            return True
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self._max_new_tokens if longest else len(self.texts[0])
        worst = float(self._ended_scores.min()) if self._has_ended.any() else _NEVER
        return not bool(self._scores[0] / length**settings.length_penalty > worst)
