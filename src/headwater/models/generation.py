"""Text generation: tokens sampled one at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.core.seeding import derive_seed


class LanguageModel(Protocol):
    """What generation needs of a model; it should be in eval mode."""

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens."""

    def new_cache(self, max_length: int) -> Any:
        """An empty cache for sequences of up to `max_length` tokens."""

    def next_logits(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        """Logits [batch, vocab] of the token after the last of `input_ids` [batch, seq]."""


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
    """Continue each prompt; the same arguments give the same tokens.

    Args:
        model: the model, in eval mode.
        input_ids: prompts [batch, seq], all of one length.
        max_new_tokens: tokens to add at most.
        temperature: divides the logits; 0 takes the most likely token each time.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the smallest set of most likely tokens whose probability reaches `top_p` only.
        seed: keys the random stream.
        eos: token that ends a sequence, or several; a sequence that has ended is filled up with the first.

    Returns:
        Prompts and what follows them, [batch, seq + up to max_new_tokens].

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
    """One token for each row of `logits` [batch, vocab]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        logits = _keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Nucleus sampling (arXiv:1904.09751): tokens outside of the nucleus become impossible."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p  # what is more likely reaches top_p already
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise ConfigError(f"temperature {temperature} is negative", remedy="write 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k {top_k} leaves no token", remedy="write 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p {top_p} is not a probability above 0", remedy="write for example 0.9")


def _check_length(model: LanguageModel, input_ids: Tensor, max_new_tokens: int) -> None:
    prompt = input_ids.shape[1]
    room = max(model.max_length - prompt + 1, 0)  # the last new token is never read: it needs no position
    if prompt == 0:
        raise DataError("the prompt is empty", remedy="start it with at least one token")
    if max_new_tokens > room:
        raise DataError(
            f"a prompt of {prompt} tokens and {max_new_tokens} new ones do not fit"
            f" the {model.max_length} positions of the model",
            remedy=f"ask for at most {room} new tokens, or shorten the prompt",
        )
