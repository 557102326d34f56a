"""The most likely tokens at masked places of texts, for encoders such as BERT."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class MaskModel(Protocol):
    """A model that predicts masked tokens."""

    @property
    def padding_id(self) -> int:
        """The token id that fills sequences."""

    def logits_at(self, input_ids: Tensor, attention_mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return the logits [n, vocab] at `places` [n] of the sequences `rows` [n].

        Args:
            input_ids: token ids, [batch, seq].
            attention_mask: 0 for padding, [batch, seq].
            rows: numbers of sequences.
            places: positions in these sequences.
        """


@dataclasses.dataclass(frozen=True)
class Filling:
    """A token for a masked place. The names are those of the transformers library.

    Attributes:
        score: its probability.
        token: its id.
        token_str: its text.
        sequence: the whole text with this token at the place.
    """

    score: float
    token: int
    token_str: str
    sequence: str


@dataclasses.dataclass(frozen=True)
class MaskedText:
    """A text with masked places.

    Attributes:
        tokens: its token ids.
        places: positions of the mask token; at least one.
    """

    tokens: tuple[int, ...]
    places: tuple[int, ...]


@final
class MaskFiller:
    """Fills masked places. Texts of one call are computed together, in few passes over the weights.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        mask_id: id of the mask token.
        device: device of the model.
        rows: largest number of texts of a pass.
        max_length: largest number of tokens of a text, and of masked places of a pass.
        computing: returns a context in which the model can be called.

    Attributes:
        max_length: see above.
        passes: passes over the weights so far.
    """

    def __init__(
        self,
        model: MaskModel,
        tokenizer: Tokenizer,
        mask_id: int,
        device: torch.device | str,
        rows: int,
        max_length: int,
        computing: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    ) -> None:
        self.max_length = max_length
        self.passes = 0
        self._model = model
        self._tokenizer = tokenizer
        self._mask_id = mask_id
        self._device = torch.device(device)
        self._rows = rows
        self._computing = computing

    def read(self, text: str) -> MaskedText:
        """Return the tokens of a text. Any thread may call this.

        Raises:
            DataError: if it has no mask token, or is too long for the model.
        """
        tokens = tuple(self._tokenizer.encode_batch_fast([text])[0].ids)
        places = tuple(place for place, token in enumerate(tokens) if token == self._mask_id)
        name = self._tokenizer.id_to_token(self._mask_id)
        if not places:
            raise DataError(
                f"expected a text with the mask token {name}, got {text[:100]!r}",
                remedy=f"write {name} where the model is to fill in a token",
            )
        if len(tokens) > self.max_length:
            raise DataError(
                f"expected a text of at most {self.max_length} tokens, got {len(tokens)}",
                remedy="shorten the text",
            )
        return MaskedText(tokens, places)

    def fill(self, texts: Sequence[MaskedText], top_k: int = 5) -> list[list[list[Filling]]]:
        """Return the most likely tokens: for each text, for each of its places, the most likely one first.

        Args:
            texts: the texts.
            top_k: tokens for each place; all tokens if the vocabulary has fewer.

        Raises:
            ConfigError: if `top_k` is not positive.
        """
        if top_k < 1:
            raise ConfigError(
                f"expected at least 1, got {top_k}", where="top_k", remedy="use, for example, 5"
            )
        found: dict[int, list[list[Filling]]] = {}
        for numbers in self._divided(texts):
            chosen = [texts[number] for number in numbers]
            found |= zip(numbers, self._filled(chosen, top_k), strict=True)
        return [found[number] for number in range(len(texts))]

    def _divided(self, texts: Sequence[MaskedText]) -> Iterator[list[int]]:
        """Yield the numbers of the texts of each pass. Texts of similar lengths are together."""
        numbers: list[int] = []
        places = 0
        for number in sorted(range(len(texts)), key=lambda number: len(texts[number].tokens)):
            more = len(texts[number].places)
            if numbers and (len(numbers) == self._rows or places + more > self.max_length):
                yield numbers
                numbers, places = [], 0
            numbers.append(number)
            places += more
        if numbers:
            yield numbers

    def _filled(self, texts: Sequence[MaskedText], top_k: int) -> Iterator[list[list[Filling]]]:
        """Yield the fillings of each text of a pass."""
        longest = max(len(text.tokens) for text in texts)
        padding = self._model.padding_id
        batch = (
            torch.tensor([[*text.tokens, *[padding] * (longest - len(text.tokens))] for text in texts]),
            torch.tensor([[1] * len(text.tokens) + [0] * (longest - len(text.tokens)) for text in texts]),
            torch.tensor([row for row, text in enumerate(texts) for _ in text.places]),
            torch.tensor([place for text in texts for place in text.places]),
        )
        with self._computing():
            scores = likely(self._model, *(each.to(self._device) for each in batch))
        self.passes += 1
        values, tokens = (each.cpu() for each in scores.topk(min(top_k, scores.shape[-1])))
        rows = iter(zip(values.tolist(), tokens.tolist(), strict=True))
        for text in texts:
            yield [
                [self._filling(text, place, *pair) for pair in zip(*next(rows), strict=True)]
                for place in text.places
            ]

    def _filling(self, text: MaskedText, place: int, score: float, token: int) -> Filling:
        whole = [*text.tokens[:place], token, *text.tokens[place + 1 :]]
        whole = [each for each in whole if each != self._model.padding_id]
        # Otherwise the other mask tokens would not be seen.
        skips = len(text.places) == 1
        return Filling(
            score,
            token,
            str(self._tokenizer.decode([token], skip_special_tokens=False)),
            str(self._tokenizer.decode(whole, skip_special_tokens=skips)),
        )


def likely(
    model: MaskModel, input_ids: Tensor, attention_mask: Tensor, rows: Tensor, places: Tensor
) -> Tensor:
    """Return the probabilities of all tokens at some places, fp32 [n, vocab]. See `MaskModel.logits_at`."""
    return model.logits_at(input_ids, attention_mask, rows, places).float().softmax(-1)
