"""Generation with a model in memory: all prompts of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headwater.core.seeding import derive_seed
from headwater.generation.batcher import Batcher
from headwater.generation.beams import BeamSearch
from headwater.generation.requests import Generation, GenerationRequest, Limits
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
    no_repeat_ngram_size: int = 0,
    num_beams: int = 1,
    early_stopping: bool | Literal["never"] = False,
    length_penalty: float = 1.0,
) -> Tensor:
    """Generate tokens that continue each prompt; the same arguments produce the same tokens.

    If `num_beams` is above 1, beam search finds the tokens. It draws nothing, so `temperature`, `top_k`,
    `top_p` and `seed` have no effect.

    Args:
        model: the model, in eval mode.
        input_ids: prompts of the same length, [batch, seq].
        max_new_tokens: maximum number of new tokens; 0 returns the prompts.
        temperature: divisor of the logits; 0: always take the most likely token.
        top_k: sample only among the k most likely tokens.
        top_p: sample only among the smallest set of most likely tokens whose probability reaches `top_p`.
        seed: seed of the random stream.
        eos: id of the end token, or several ids; a sequence that has ended is padded with the first.
        no_repeat_ngram_size: never write a sequence of this many tokens twice; 0: no limit.
        num_beams: texts that beam search continues at once; 1: no beam search.
        early_stopping: see `BeamSearch`.
        length_penalty: see `BeamSearch`.

    Returns:
        Prompts with their continuations, [batch, seq + up to max_new_tokens].

    Raises:
        ConfigError: if an argument of the sampling or of the beam search is out of range.
        DataError: if a prompt is empty, or does not fit the model together with the new tokens.
    """
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    rows, length = input_ids.shape
    beams = (
        None
        if num_beams == 1
        else BeamSearch(num_beams, early_stopping, length_penalty, no_repeat_ngram_size)
    )
    whole = rows * num_beams * (length + max_new_tokens)
    batcher = Batcher(model, input_ids.device, Limits(whole, whole, rows * num_beams))
    found: list[Generation] = []
    for row, prompt in enumerate(input_ids.tolist()):
        own = Sampling(temperature, top_k, top_p, derive_seed(seed, row), no_repeat_ngram_size)
        request = GenerationRequest(tuple(prompt), max_new_tokens, own, frozenset(ends), beams=beams)
        found.append(batcher.add(request))
    batcher.run()
    longest = max((len(each.output) for each in found), default=0)
    padded = [each.output + [*ends[:1]] * (longest - len(each.output)) for each in found]
    new = torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, new.reshape(rows, longest)], dim=1)
