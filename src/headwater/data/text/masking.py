"""Dynamic masking for BERT: different masked tokens in every epoch (arXiv:1907.11692, section 4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from headwater.config.data import DynamicMaskDataConfig
from headwater.config.models.encoder import BertConfig
from headwater.core.errors import DataError
from headwater.data.file_index import FileIndex
from headwater.data.loader import Batch
from headwater.data.order import random_generator
from headwater.data.records import CSVRecords, FieldSpec, Records, Values, record_files
from headwater.data.text.fields import segment_field
from headwater.data.text.masks import choose_masks
from headwater.data.text.wordpiece import BEGIN, MASK, PAD, SEPARATOR, UNKNOWN, read_vocabulary

NEEDED_TOKENS = (PAD, UNKNOWN, BEGIN, SEPARATOR, MASK)
"""Tokens that the vocabulary must have."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """Settings of dynamic masking: the form of the samples, and how many tokens to predict.

    Attributes:
        length: tokens per sample.
        predictions: maximum number of predicted tokens of a sample.
        fraction: fraction of the tokens to predict.
        next_sentence: include the label of next sentence prediction.
        segments: number of token types of the model; 0: any number.
        seed: seed of the masks.
    """

    length: int
    predictions: int
    fraction: float
    next_sentence: bool
    segments: int
    seed: int


class MaskedTexts:
    """A data set of tokenized texts with masked tokens to predict.

    A batch has `input_ids`, `attention_mask` and `token_type_ids`, int64 [batch, length];
    `masked_lm_positions`, `masked_lm_ids` and `masked_lm_weights`, int64 [batch, predictions]; and, if
    `next_sentence` is set, `next_sentence_label`, int64 [batch].

    Args:
        files: CSV files with the columns `tokens`, `segment_ids` and, for next sentence prediction,
            `is_random_next`.
        ids: id of each token, as `read_vocabulary` returns it.
        masking: form of the samples, and the choice of the tokens to predict.

    Raises:
        DataError: if a file is damaged, or a column is missing.
    """

    def __init__(self, files: Sequence[CSVRecords], ids: Mapping[str, int], masking: Masking) -> None:
        self._ids, self._masking = ids, masking
        self._ordinary = np.array(sorted(n for token, n in ids.items() if not token.startswith("[")))
        self._texts = _Texts(files)
        fields = [segment_field(masking.length, masking.segments)]
        if masking.next_sentence:
            fields.append(FieldSpec("next_sentence_label", ("is_random_next", "next_sentence_labels")))
        self._records = Records(files, fields, masking.length)

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self._masking.length

    def __len__(self) -> int:
        return len(self._records)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            samples = [self._sample(draw) for draw in draws]
        except DataError as error:
            return error
        return {name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in samples[0]}

    def _sample(self, draw: int) -> dict[str, Values]:
        masking, index = self._masking, draw % len(self)
        tokens = self._texts.tokens(index)[: masking.length]
        unknown = self._ids[UNKNOWN]
        whole = np.array([self._ids.get(token, unknown) for token in tokens], dtype=np.int64)
        ids, chosen = choose_masks(
            whole,
            np.array([token not in (BEGIN, SEPARATOR, PAD) for token in tokens]),
            ordinary=self._ordinary,
            mask=self._ids[MASK],
            share=masking.fraction,
            most=masking.predictions,
            generator=random_generator(masking.seed, "masking", draw),
        )
        return {
            "input_ids": _filled(ids, masking.length, self._ids[PAD]),
            "attention_mask": _filled(np.ones(len(ids), dtype=np.int64), masking.length, 0),
            "masked_lm_positions": _filled(chosen, masking.predictions, 0),
            "masked_lm_ids": _filled(whole[chosen], masking.predictions, 0),
            "masked_lm_weights": _filled(np.ones(len(chosen), dtype=np.int64), masking.predictions, 0),
            **self._records.sample(index),
        }


def read_masked_texts(config: DynamicMaskDataConfig, model: BertConfig) -> MaskedTexts:
    """Return the data set that a section of a params file describes.

    Raises:
        DataError: if a file is missing or damaged, or the vocabulary does not fit the model.
    """
    files = [CSVRecords(path) for path in record_files(config.data_dir, (".csv",))]
    masking = Masking(
        length=config.max_sequence_length or model.max_position_embeddings,
        predictions=config.max_predictions_per_seq,
        fraction=config.masked_lm_prob,
        next_sentence=not model.disable_nsp,
        segments=model.num_segments,
        seed=config.shuffle_seed or 0,
    )
    ids = read_vocabulary(config.vocab_file, model.vocab_size, needed=NEEDED_TOKENS)
    return MaskedTexts(files, ids, masking)


class _Texts:
    """The column `tokens` of several CSV files."""

    def __init__(self, files: Sequence[CSVRecords]) -> None:
        self._files, self._index = list(files), FileIndex(map(len, files))
        for file in files:
            if "tokens" not in file.names:
                raise DataError(
                    f"the file has no column tokens; its columns: {', '.join(sorted(file.names))}",
                    where=str(file.path),
                    remedy="set data_dir to files prepared with --dynamic_mask",
                )

    def tokens(self, index: int) -> list[str]:
        number, place = self._index.find(index)
        file = self._files[number]
        tokens = file.read(place, "tokens")
        if not tokens or not all(isinstance(token, str) for token in tokens):
            raise DataError(
                "expected a list of tokens in column tokens",
                where=f"{file.path}, line {place + 2}",
                remedy="correct or remove the line",
            )
        return list(tokens)


def _filled(values: Values, length: int, fill: int) -> Values:
    filled = np.full(length, fill, dtype=np.int64)
    filled[: len(values)] = values
    return filled
