"""What a preparation found and made: the last file it writes, so that its presence means complete data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError

FILE_NAME = "statistics.json"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Figures of one prepared data set.

    Attributes:
        documents: documents read; empty ones are not counted.
        text_bytes: bytes of their text in UTF-8.
        tokens: tokens of all documents, each with its end-of-text token.
        dropped_tokens: tokens at the end that do not fill a sample.
        bytes_per_token: `text_bytes` per token.
        unigram_entropy: entropy of the distribution of tokens, in nats: the loss of a model that knows
            the frequency of each token and nothing else.
        vocab_size: one more than the largest token id.
        end_of_text_id: id of the token that ends each document.
        sequence_length: tokens of a sample.
        train_samples: samples in `train/`.
        val_samples: samples in `val/`.
        tokenizer_file: name of the tokenizer's file in the same folder.
        settings: what was asked for.
        mode: kind of the samples.
        loss_tokens: labels that count in the loss, where samples are rows of tokens.
        padding_tokens: positions of these samples that hold no text.
        bad_records: records that could not be used and were left out.
        empty_records: records without text, left out.
        too_long_records: records with more tokens than a sample holds, left out.
        cut_records: those that were cut.
        images: images in the texts, each as often as it occurs.
    """

    documents: int
    text_bytes: int
    tokens: int
    dropped_tokens: int
    bytes_per_token: float
    unigram_entropy: float
    vocab_size: int
    end_of_text_id: int
    sequence_length: int
    train_samples: int
    val_samples: int
    tokenizer_file: str
    settings: dict[str, Any]
    mode: str = "pretraining"
    loss_tokens: int = 0
    padding_tokens: int = 0
    bad_records: int = 0
    empty_records: int = 0
    too_long_records: int = 0
    cut_records: int = 0
    images: int = 0

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_statistics(folder: Path) -> Statistics:
    """The statistics of the data prepared in `folder`.

    Raises:
        DataError: if the folder holds no complete prepared data.
    """
    path = folder / FILE_NAME
    try:
        return Statistics(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        remedy = "prepare it with: headwater data INPUT --out " + str(folder)
        raise DataError("folder holds no prepared data", where=str(folder), remedy=remedy) from error
    except (ValueError, TypeError) as error:
        what = f"statistics cannot be read: {error}"
        raise DataError(what, where=str(path), remedy="prepare the data again (headwater data)") from error


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution of tokens that were counted, `counts` [vocab_size]."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
