"""Vectors of texts, computed by an encoder in few passes over its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from headwater.core.errors import DataError, NonFiniteError
from headwater.data.passages import Passage, ended, titled
from headwater.models.bert import text_vectors
from headwater.models.encoder import Encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class TextTokens:
    """The tokenizer of an encoder.

    Attributes:
        tokenizer: the tokenizer.
        end: id of the token that ends each text.
        length: largest number of tokens that the encoder reads.
    """

    tokenizer: Tokenizer
    end: int
    length: int

    def of(self, texts: Sequence[str | tuple[str, str]]) -> list[list[int]]:
        """Return the tokens of each text or pair of texts, which may be longer than the encoder reads."""
        return [ended(each.ids, self.end) for each in self.tokenizer.encode_batch_fast(list(texts))]

    def of_passages(self, passages: Sequence[Passage]) -> list[list[int]]:
        """Return the tokens of each passage with its title; see `titled`."""
        return self.of([titled(self.tokenizer, each.title, each.text, self.length) for each in passages])


@final
class VectorEncoder:
    """Encodes texts as vectors. Texts of similar lengths are computed together.

    Args:
        model: the encoder, in eval mode.
        texts: its tokenizer.
        device: device of the encoder.
        rows: largest number of texts of a pass over the weights.
        computing: returns a context in which the encoder can be called.

    Attributes:
        texts: see above.
        dimension: elements of a vector.
    """

    def __init__(
        self,
        model: Encoder,
        texts: TextTokens,
        device: torch.device | str,
        rows: int,
        computing: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    ) -> None:
        self.texts = texts
        self.dimension = model.config.hidden_size
        self._model = model
        self._device = torch.device(device)
        self._rows = rows
        self._computing = computing

    def encode(
        self, texts: Sequence[Sequence[int]], on_progress: Callable[[int], None] = lambda count: None
    ) -> Tensor:
        """Return the vector of each text, fp32 [texts, dimension].

        Args:
            texts: the tokens of each text, at most `texts.length` of them.
            on_progress: called with the number of texts that are done.

        Raises:
            DataError: if a token is not in the vocabulary of the encoder.
            NonFiniteError: if a vector is not finite.
        """
        vectors = torch.empty(len(texts), self.dimension)
        # The longest texts come first, because a pass of these takes the most memory.
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for start in range(0, len(order), self._rows):
            chosen = order[start : start + self._rows]
            vectors[chosen] = self._encoded([texts[number] for number in chosen])
            on_progress(start + len(chosen))
        if not vectors.isfinite().all():
            raise NonFiniteError(
                "expected finite vectors, found NaN or infinity in the output of the encoder",
                remedy="train the encoder again, or use an earlier checkpoint (--checkpoint_path)",
            )
        return vectors

    def _encoded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of the texts of one pass."""
        longest, padding = max(map(len, texts)), self._model.config.pad_token_id
        input_ids = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
        largest, size = int(input_ids.max()), self._model.config.vocab_size
        if largest >= size:
            raise DataError(
                f"expected token ids below {size}, the vocabulary of the encoder; got {largest}",
                where="--tokenizer",
                remedy="name the tokenizer with which the encoder was trained",
            )
        attention_mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        with self._computing():
            return text_vectors(
                self._model,
                input_ids=input_ids.to(self._device),
                attention_mask=attention_mask.to(self._device),
            ).cpu()
