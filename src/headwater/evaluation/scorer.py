"""Log-likelihoods and generated tokens of a streamed language model, in few passes over its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from headwater.core.errors import ConfigError, DataError
from headwater.core.patience import notice_if_long
from headwater.core.units import counted
from headwater.evaluation.passes import Pass, Request, Score, check_ids, part_of_pass, passes
from headwater.generation.batcher import ACTIVE_PER_ROW, Batcher
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Chosen, Sampling
from headwater.models.sequences import LanguageModel, read_largest
from headwater.stream.engine import Engine

PADDING = 0
"""The token id that fills sequences. No other token sees it."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text that is continued.

    Attributes:
        tokens: its token ids; at least one.
        max_new_tokens: largest number of tokens of the continuation; at least one.
        sampling: how tokens are chosen.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


class ScoringModel(LanguageModel, Protocol):
    """A language model: the interface that `Scorer` needs."""

    def token_scores(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, columns: Tensor, targets: Tensor
    ) -> Tensor:
        """Return log-likelihoods, and which tokens are the most likely ones; see `Decoder.token_scores`."""


@final
class Scorer:
    """Answers requests with a streamed model.

    The sequences of a pass are computed together, so each weight is fetched once for all of them. A pass
    holds at most `max_tokens` tokens, so of shorter sequences it holds more. The ranks of the engine divide
    each pass, and must make the same calls. All of them return all results.

    Args:
        engine: has the model.
        vocab_size: tokens in the model's vocabulary.
        max_length: largest number of tokens that the model may read at once.
        max_tokens: largest number of tokens of a pass on this rank; at least `max_length`.
    """

    def __init__(self, engine: Engine, vocab_size: int, max_length: int, max_tokens: int) -> None:
        self.max_length = max_length
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_tokens = max(max_tokens, max_length)

    @property
    def _model(self) -> ScoringModel:
        return cast(ScoringModel, self._engine.model)

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each request.

        Raises:
            DataError: if a request does not fit into the model, or has a token outside of its vocabulary.
        """
        check_ids([request.context + request.continuation for request in requests], self._vocab_size)
        longest = max((len(request.inputs) for request in requests), default=0)
        if longest > self.max_length:
            raise DataError(
                f"expected at most {self.max_length} tokens before the last one, got {longest}",
                remedy="shorten the text, or use a model with more positions",
            )
        found: dict[int, Score] = {}
        fabric, count = self._engine.fabric, 0
        with self._computing("log-likelihoods", len(requests)) as done:
            for each in passes(requests, self._max_tokens, fabric.size):
                own = part_of_pass(each, fabric.rank, fabric.size)
                if own:
                    found |= self._pass_scores(requests, own)
                count += sum(map(len, each.values()))
                done(count)
            for others in fabric.gather_objects(found, dict[int, Score]):
                found |= others
        return [found[number] for number in range(len(requests))]

    def _pass_scores(self, requests: Sequence[Request], each: Pass) -> dict[int, Score]:
        """Return the scores of the requests of a pass on this rank, by the number of the request."""
        targets: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        order: list[int] = []
        for row, (tokens, numbers) in enumerate(each.items()):
            for number in numbers:
                continuation = requests[number].continuation
                targets += continuation
                rows += [row] * len(continuation)
                places += range(len(tokens) - len(continuation), len(tokens))
                order.append(number)
        positions, columns = torch.tensor(places).unique(return_inverse=True)
        length = len(next(iter(each)))
        input_ids = torch.tensor([[*tokens, *[PADDING] * (length - len(tokens))] for tokens in each])
        batch = (input_ids, positions, torch.tensor(rows), columns, torch.tensor(targets))
        with self._engine.inference():
            scores = self._model.token_scores(*(tensor.to(self._engine.plan.device) for tensor in batch))
        # In fp64: a long text is a sum of many terms.
        parts = scores.double().cpu().split([len(requests[number].continuation) for number in order], dim=1)
        return {
            number: Score(float(part[0].sum()), bool(part[1].all()))
            for number, part in zip(order, parts, strict=True)
        }

    def continuations(
        self,
        prompts: Sequence[Prompt],
        ends: Sequence[int],
        ended: Callable[[list[int]], bool] = lambda tokens: False,
    ) -> list[list[int]]:
        """Return the generated tokens of each prompt, without the end token and what follows it.

        Args:
            prompts: the prompts.
            ends: ids of the tokens that end a text; at least one.
            ended: called with the tokens generated so far; True ends the continuation.

        Raises:
            DataError: if a prompt does not fit into the model, or has a token outside of its vocabulary.
        """
        check_ids([prompt.tokens for prompt in prompts], self._vocab_size)
        active = ACTIVE_PER_ROW * (self._max_tokens // self.max_length)
        limits = Limits(self._max_tokens, self._max_tokens, active)
        batcher = Batcher(self._model, self._engine.plan.device, limits, self._engine.inference)

        def request(prompt: Prompt) -> GenerationRequest:
            tokens: list[int] = []

            def receive(chosen: Chosen) -> bool:
                tokens.append(chosen.token)
                return ended(tokens)

            return GenerationRequest(
                tuple(prompt.tokens), prompt.max_new_tokens, prompt.sampling, frozenset(ends), receive
            )

        # The longest first, because short ones at the end leave less memory unused.
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].tokens))
        fabric = self._engine.fabric
        own = {number: batcher.add(request(prompts[number])) for number in order[fabric.rank :: fabric.size]}
        with self._computing("generated texts", len(prompts)) as done:
            # An estimate: the other ranks have finished about as many.
            batcher.run(lambda left: done(min((len(own) - left) * fabric.size, len(prompts))))
            texts = {number: each.text_tokens for number, each in own.items()}
            for others in fabric.gather_objects(texts, dict[int, list[int]]):
                texts |= others
        return [texts[number] for number in range(len(prompts))]

    @contextmanager
    def _computing(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Compute in eval mode and print the progress. Yield a function to call with the number done."""
        training = self._engine.model.training
        self._engine.model.eval()
        if self._engine.fabric.size > 1:
            self._engine.store.flush()  # so that each rank can read weights without the others
        try:
            with notice_if_long(
                f"evaluating: 0 of {counted(total, 'request', 'requests')} for {what}"
            ) as activity:

                def done(count: int) -> None:
                    activity.name = f"evaluating: {count} of {total} requests for {what}"

                yield done
        finally:
            self._engine.model.train(training)


def largest_pass(model: nn.Module, batch: Mapping[str, Any], *, generates: bool) -> Tensor:
    """Run the largest pass of an evaluation, for the dry run of the plan.

    Args:
        model: the model.
        batch: `input_ids` [batch, seq], padded to the longest sequence.
        generates: also read the sequences as prompts, with their keys and values in memory.
    """
    scoring = cast(ScoringModel, model)
    input_ids = batch["input_ids"].long()
    if generates:
        read_largest(scoring, input_ids, input_ids.numel(), ACTIVE_PER_ROW)
    size, length = input_ids.shape
    positions = torch.arange(length, device=input_ids.device)
    rows = torch.arange(size, device=input_ids.device).repeat_interleave(length)
    return scoring.token_scores(input_ids, positions, rows, positions.repeat(size), input_ids.flatten())


def check_length(model_length: int, asked: int | None) -> int:
    """Return the largest number of tokens that the model may read at once.

    Args:
        model_length: positions of the model.
        asked: the user's limit, if any.

    Raises:
        ConfigError: if the limit is less than 1, or larger than the model allows.
    """
    if asked is not None and asked < 1:
        raise ConfigError(
            f"expected at least 1 token, got {asked}",
            where="max_sequence_length",
            remedy=f"write a number from 1 to {model_length}, or leave it out",
        )
    if asked is not None and asked > model_length:
        raise ConfigError(
            f"expected at most {model_length}, the positions of the model; got {asked}",
            where="max_sequence_length",
            remedy=f"write {model_length} or less, or leave it out",
        )
    return model_length if asked is None else asked
