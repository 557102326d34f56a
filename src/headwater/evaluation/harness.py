"""A streamed model as a model of EleutherAI's lm-evaluation-harness. Needs the package lm-eval."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from headwater.core.errors import ConfigError, DataError
from headwater.core.patience import print_notice
from headwater.core.seeding import derive_seed
from headwater.core.units import counted
from headwater.data.codec import Codec
from headwater.evaluation.passes import Request, windows
from headwater.evaluation.scorer import Prompt, Scorer
from headwater.generation.sampling import Sampling

MAX_NEW_TOKENS = 256
"""Tokens to generate if neither the task nor the user sets a number, as in the harness."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the requests of the harness. Token ids and division into windows are those of its `hf` model.

    Args:
        scorer: computes.
        codec: the tokenizer.
        seed: seed of generated tokens.
        truncate: shorten prompts that are too long, from their beginning; otherwise they are errors.
        settings: what is written into the results as the settings of the model.
    """

    def __init__(
        self, scorer: Scorer, codec: Codec, *, seed: int = 0, truncate: bool = False, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self._scorer = scorer
        self._codec = codec
        self._seed = seed
        self._truncate = truncate
        self._settings = settings

    @property
    def eot_token_id(self) -> int:
        return self._codec.ends[0]

    @property
    def prefix_token_id(self) -> int:
        return self._codec.prefix

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads at once."""
        return self._scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self._codec.folder).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the settings of the model, for the results."""
        return self._settings

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._codec.encode(string, special=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._codec.chat_template if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._codec.conversation(chat_history, prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        given = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        longest = max((len(each.continuation) for each in given), default=0)
        if longest > self.max_length:
            raise self._too_long(1, f"an answer of {longest} tokens", "a task with shorter answers")
        fitting = self._shortened([len(each.inputs) for each in given], self.max_length)
        found = self._scorer.scores([each.cut(self.max_length) for each in given] if fitting else given)
        answers = [(score.log_likelihood, score.is_greedy) for score in found]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        parts: list[Request] = []
        spans: list[slice] = []
        for request in requests:
            first = len(parts)
            parts += windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length)
            spans.append(slice(first, len(parts)))
        found = self._scorer.scores(parts)
        totals = [sum(score.log_likelihood for score in found[span]) for span in spans]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found: dict[int, str] = {}
        for key, numbers in groups.items():
            contexts = [requests[number].args[0] for number in numbers]
            found |= zip(numbers, self._generate(contexts, json.loads(key)), strict=True)
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def _generate(self, contexts: list[str], arguments: dict[str, Any]) -> list[str]:
        """Return the texts that continue each context, cut at the task's stop words."""
        end = str(self._codec.tokenizer.id_to_token(self.eot_token_id))
        stops, new_tokens, sampling = _sampling(arguments, end, self._seed)
        room = self.max_length - new_tokens
        if room < 1:
            raise self._too_long(
                1,
                f"{new_tokens} new tokens",
                "fewer new tokens: --max_tokens, or max_gen_toks of the task",
            )
        prompts = [self.tok_encode(context) for context in contexts]
        if self._shortened([len(prompt) for prompt in prompts], room):
            prompts = [prompt[-room:] for prompt in prompts]
        written = self._scorer.continuations(
            [
                Prompt(
                    prompt, new_tokens, dataclasses.replace(sampling, seed=derive_seed(self._seed, number))
                )
                for number, prompt in enumerate(prompts)
            ],
            self._codec.ends,
            lambda tokens: any(stop in self._codec.decode(tokens) for stop in stops),
        )
        return [postprocess_generated_text(self._codec.decode(tokens), stops, None) for tokens in written]

    def _shortened(self, lengths: list[int], room: int) -> bool:
        """True if some prompts are longer than `room` and are to be shortened.

        Raises:
            DataError: if some are longer, but may not be shortened.
        """
        count = sum(length > room for length in lengths)
        if count and not self._truncate:
            raise self._too_long(
                count,
                f"a prompt of {max(lengths)} tokens",
                "a smaller --num_fewshot, or --truncate to leave out the beginning of these prompts",
                room,
            )
        if count:
            prompts = counted(count, "prompt", "prompts")
            print_notice(f"{prompts} of {len(lengths)} shortened to the last {room} tokens")
        return count > 0

    def _too_long(self, count: int, what: str, remedy: str, room: int | None = None) -> DataError:
        return DataError(
            f"{what} does not fit: expected at most {room or self.max_length} of the model's "
            f"{self.max_length} positions" + (f"; {count} prompts are too long" if count > 1 else ""),
            where="max_sequence_length",
            remedy=f"use {remedy}",
        )


def _sampling(arguments: dict[str, Any], end: str, seed: int) -> tuple[list[str], int, Sampling]:
    """Return the stop words, the most new tokens and the sampling of a task's `generation_kwargs`.

    Raises:
        ConfigError: if the arguments ask for something else than sampling, such as beams.
    """
    given = dict(normalize_gen_kwargs(arguments, MAX_NEW_TOKENS))
    stops = handle_stop_sequences(given.pop("until", None), eos=end)
    sampled = bool(given.pop("do_sample", False))
    temperature = float(given.pop("temperature", 1.0))
    new_tokens = int(given.pop("max_gen_toks"))
    sampling = Sampling(
        temperature=temperature if sampled else 0.0,
        top_k=given.pop("top_k", None),
        top_p=given.pop("top_p", None),
        seed=seed,
    )
    if given:
        raise ConfigError(
            f"generation does not know {', '.join(sorted(given))}",
            where="generation_kwargs of the task",
            remedy="keep until, max_gen_toks, do_sample, temperature, top_k and top_p",
        )
    return [stop for stop in stops if stop], new_tokens, sampling
