"""Generation with a model in memory: all prompts of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.core.seeding import derive_seed
from headwater.generation.batcher import Batcher, Generation, GenerationRequest, Limits
from headwater.generation.sampling import Sampling
from headwater.models.sequences import LanguageModel


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
        max_new_tokens: maximum number of new tokens; 0 returns the prompts.
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
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    rows, length = input_ids.shape
    whole = rows * (length + max_new_tokens)
    batcher = Batcher(model, input_ids.device, Limits(whole, whole, rows))
    found: list[Generation] = []
    for row, prompt in enumerate(input_ids.tolist()):
        own = Sampling(temperature, top_k, top_p, derive_seed(seed, row))
        found.append(batcher.add(GenerationRequest(tuple(prompt), max_new_tokens, own, frozenset(ends))))
    batcher.run()
    longest = max((len(each.output) for each in found), default=0)
    padded = [each.output + [*ends[:1]] * (longest - len(each.output)) for each in found]
    new = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, new.reshape(rows, longest)], dim=1)
