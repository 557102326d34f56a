"""Text generation: tokens sampled one at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.core.seeding import derive_seed


class LanguageModel(Protocol):
    """A language model: the interface that `generate` needs."""

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence in tokens."""

    def new_cache(self, max_length: int) -> Any:
        """Return an empty cache for sequences of up to `max_length` tokens."""

    def next_logits(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        """Return the logits [batch, vocab] of the token after the last of `input_ids` [batch, seq]."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
) -> Tensor:
    """Generate tokens that continue each prompt; the same arguments produce the same tokens.

    Args:
        model: the model, in eval mode.
        input_ids: prompts of the same length, [batch, seq].
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0: always take the most likely token.
        top_k: sample only among the k most likely tokens.
        top_p: sample only among the smallest set of most likely tokens whose probability reaches `top_p`.
        seed: seed of the random stream.
        eos: id of the end token, or several ids; a sequence that has ended is padded with the first.

    Returns:
        Prompts with their continuations, [batch, seq + up to max_new_tokens].

    Raises:
        ConfigError: if a sampling argument is out of range.
        DataError: if a prompt is empty, or does not fit the model together with the new tokens.
    """
    _check_sampling(temperature, top_k, top_p)
    _check_length(model, input_ids, max_new_tokens)
    generator = torch.Generator(input_ids.device).manual_seed(derive_seed(seed, "generate"))
    cache = model.new_cache(input_ids.shape[1] + max_new_tokens)
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    ends = torch.tensor([] if eos is None else eos, dtype=input_ids.dtype, device=input_ids.device).view(-1)
    output, unseen = input_ids, input_ids
    for _ in range(max_new_tokens):
        logits = model.next_logits(unseen, cache).float()
        tokens = _sample(logits, temperature, top_k, top_p, generator).to(input_ids.dtype)
        if len(ends):
            tokens = torch.where(ended, ends[0], tokens)
            ended |= torch.isin(tokens, ends)
        unseen = tokens.unsqueeze(1)
        output = torch.cat([output, unseen], dim=1)
        if ended.all():
            break
    return output


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Return one token for each row of `logits` [batch, vocab]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        logits = _keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Return `logits` with -inf for tokens outside of the nucleus (nucleus sampling, arXiv:1904.09751)."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # the more likely tokens already reach top_p
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    # Not `temperature < 0`: NaN must be refused too.
    if not temperature >= 0:
        what = f"expected temperature of at least 0, got {temperature}"
        raise ConfigError(what, where="temperature", remedy="use 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        what = f"expected top_k of at least 1, got {top_k}"
        raise ConfigError(what, where="top_k", remedy="use 1 or more, or remove it")
    if top_p is not None and not 0 < top_p <= 1:
        what = f"expected top_p above 0 and at most 1, got {top_p}"
        raise ConfigError(what, where="top_p", remedy="use, for example, 0.9")


def _check_length(model: LanguageModel, input_ids: Tensor, max_new_tokens: int) -> None:
    prompt = input_ids.shape[1]
    room = max(model.max_length - prompt + 1, 0)  # + 1: the model never reads the last new token
    if prompt == 0:
        raise DataError("the prompt is empty", remedy="begin it with at least one token")
    if max_new_tokens > room:
        raise DataError(
            f"a prompt of {prompt} tokens and {max_new_tokens} new tokens do not fit into"
            f" the {model.max_length} positions of the model",
            remedy=f"request at most {room} new tokens, or shorten the prompt",
        )
