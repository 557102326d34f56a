"""Masked tokens for BERT, other ones in each pass (arXiv:1907.11692, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.data.loader import Batch
from headwater.data.records import CSVRecords, FieldSpec, Records, Values
from headwater.data.text.fields import segment_field
from headwater.data.text.masks import choose_masks
from headwater.data.text.wordpiece import BEGIN, MASK, PAD, SEPARATOR, UNKNOWN, read_vocabulary


class MaskedTexts:
    """Texts of tokens, of which some are to be guessed.

    A batch is `input_ids`, `attention_mask` and `token_type_ids` [batch, length], `masked_lm_positions`,
    `masked_lm_ids` and `masked_lm_weights` [batch, predictions], and `next_sentence_label` [batch].

    Args:
        files: CSV files with the columns `tokens`, `segment_ids` and, for the next sentence,
            `is_random_next`.
        vocab_file: tokens, one a line.
        vocab_size: the model's.
        length: tokens of a sample.
        predictions: tokens that are guessed at most.
        share: of the tokens that are guessed.
        next_sentence: whether the second text follows the first is to be learnt.
        segments: texts of a sample that the model tells apart; 0 if none.
        seed: seed of the choice.

    Raises:
        DataError: if a file is damaged, or a column is missing.
    """

    def __init__(
        self,
        files: Sequence[CSVRecords],
        vocab_file: Path,
        *,
        vocab_size: int,
        length: int,
        predictions: int,
        share: float,
        next_sentence: bool,
        segments: int,
        seed: int,
    ) -> None:
        self.sequence_length, self._predictions, self._share, self._seed = length, predictions, share, seed
        self._numbers = read_vocabulary(vocab_file, vocab_size, needed=(PAD, UNKNOWN, BEGIN, SEPARATOR, MASK))
        self._ordinary = np.array(
            sorted(n for token, n in self._numbers.items() if not token.startswith("["))
        )
        self._texts = _Texts(files)
        fields = [segment_field(length, segments)]
        if next_sentence:
            fields.append(FieldSpec("next_sentence_label", ("is_random_next", "next_sentence_labels")))
        self._records = Records(files, fields, length)

    def __len__(self) -> int:
        return len(self._records)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """The batch of these samples; see `headwater.data.source.Samples`."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        return {name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in samples[0]}

    def _sample(self, draw: int) -> dict[str, Values]:
        index = draw % len(self)
        tokens = self._texts.tokens(index)[: self.sequence_length]
        unknown = self._numbers[UNKNOWN]
        whole = np.array([self._numbers.get(token, unknown) for token in tokens], dtype=np.int64)
        random = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, "masking", draw)))
        ids, chosen = choose_masks(
            whole,
            np.array([token not in (BEGIN, SEPARATOR, PAD) for token in tokens]),
            ordinary=self._ordinary,
            mask=self._numbers[MASK],
            share=self._share,
            most=self._predictions,
            generator=random,
        )
        return {
            "input_ids": _filled(ids, self.sequence_length, self._numbers[PAD]),
            "attention_mask": _filled(np.ones(len(ids), dtype=np.int64), self.sequence_length, 0),
            "masked_lm_positions": _filled(chosen, self._predictions, 0),
            "masked_lm_ids": _filled(whole[chosen], self._predictions, 0),
            "masked_lm_weights": _filled(np.ones(len(chosen), dtype=np.int64), self._predictions, 0),
            **self._records.sample(index),
        }


class _Texts:
    """The column `tokens` of several files."""

    def __init__(self, files: Sequence[CSVRecords]) -> None:
        self._files = list(files)
        for file in files:
            if "tokens" not in file.names:
                raise DataError(
                    f"the column tokens is missing, there are {', '.join(sorted(file.names))}",
                    where=str(file.path),
                    remedy="name the folder with the files that are not masked yet",
                )

    def tokens(self, index: int) -> list[str]:
        for file in self._files:
            if index < len(file):
                tokens = file.read(index, "tokens")
                if not tokens or not all(isinstance(token, str) for token in tokens):
                    raise DataError(
                        "tokens is no list of tokens",
                        where=f"{file.path}, line {index + 2}",
                        remedy="correct it",
                    )
                return list(tokens)
            index -= len(file)
        raise AssertionError("the index lies in one of the files")


def _filled(values: Values, length: int, fill: int) -> Values:
    filled = np.full(length, fill, dtype=np.int64)
    filled[: len(values)] = values
    return filled
