"""Statistics of a preparation: the last file that it writes, so that its presence means complete data."""

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
        tokens: tokens of all documents, end-of-text tokens included.
        dropped_tokens: tokens at the end of the last document that do not fill a sample.
        bytes_per_token: `text_bytes` per token.
        unigram_entropy: entropy of the distribution of tokens, in nats. It is the loss of a model that knows
            only the frequency of each token.
        vocab_size: largest token id plus one.
        end_of_text_id: id of the token that ends each document.
        sequence_length: tokens per sample.
        train_samples: samples in `train/`.
        val_samples: samples in `val/`.
        tokenizer_file: name of the tokenizer's file in the same folder.
        settings: settings and input files of the preparation.
        mode: kind of the samples, a name in `headwater.data.modes.MODES`.
        loss_tokens: labels that count in the loss; 0 if samples are not rows of tokens.
        padding_tokens: padding positions; 0 if samples are not rows of tokens.
        bad_records: records left out because they could not be used.
        empty_records: records left out because they have no text.
        too_long_records: records left out because they have more tokens than a sample.
        cut_records: records that were cut to the length of a sample.
        duplicate_records: documents or records left out because they are equal or similar to another
            one.
        images: number of images in the texts; an image that occurs twice counts twice.
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
    duplicate_records: int = 0
    images: int = 0

    def write(self, folder: Path) -> None:
        """Write the statistics to `folder` as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_statistics(folder: Path) -> Statistics:
    """Return the statistics of the data prepared in `folder`.

    Raises:
        DataError: if the folder holds no complete prepared data.
    """
    path = folder / FILE_NAME
    try:
        return Statistics(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        remedy = "prepare data with: headwater data INPUT --out " + str(folder)
        raise DataError("folder holds no prepared data", where=str(folder), remedy=remedy) from error
    except (ValueError, TypeError) as error:
        what = f"statistics cannot be read: {error}"
        raise DataError(what, where=str(path), remedy="prepare the data again (headwater data)") from error


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy in nats of the distribution of tokens with these `counts` [vocab_size]."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
