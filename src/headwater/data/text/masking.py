"""Dynamic masking for BERT: different masked tokens in every epoch (arXiv:1907.11692, section 4.1)."""

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
    """A data set of tokenized texts with masked tokens to predict.

    A batch has `input_ids`, `attention_mask` and `token_type_ids`, int64 [batch, length];
    `masked_lm_positions`, `masked_lm_ids` and `masked_lm_weights`, int64 [batch, predictions]; and with
    `next_sentence` `next_sentence_label`, int64 [batch].

    Args:
        files: CSV files with the columns `tokens`, `segment_ids` and, for next sentence prediction,
            `is_random_next`.
        vocab_file: BERT's vocab.txt, one token per line.
        vocab_size: vocabulary of the model.
        length: tokens per sample.
        predictions: maximum number of predicted tokens of a sample.
        share: fraction of the tokens to predict.
        next_sentence: include the label of next sentence prediction.
        segments: number of token types of the model; 0: any number.
        seed: seed of the masks.

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
        """Return the batch of these draws; see `headwater.data.source.Samples`."""
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
    """The column `tokens` of several CSV files."""

    def __init__(self, files: Sequence[CSVRecords]) -> None:
        self._files = list(files)
        for file in files:
            if "tokens" not in file.names:
                raise DataError(
                    f"the file has no column tokens; its columns: {', '.join(sorted(file.names))}",
                    where=str(file.path),
                    remedy="set data_dir to files prepared with --dynamic_mask",
                )

    def tokens(self, index: int) -> list[str]:
        for file in self._files:
            if index < len(file):
                tokens = file.read(index, "tokens")
                if not tokens or not all(isinstance(token, str) for token in tokens):
                    raise DataError(
                        "expected a list of tokens in column tokens",
                        where=f"{file.path}, line {index + 2}",
                        remedy="correct or remove the line",
                    )
                return list(tokens)
            index -= len(file)
        raise AssertionError("index is beyond the last file")


def _filled(values: Values, length: int, fill: int) -> Values:
    filled = np.full(length, fill, dtype=np.int64)
    filled[: len(values)] = values
    return filled
