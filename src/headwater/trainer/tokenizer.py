"""The tokenizer of a run's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.data.codec import Codec, open_codec
from headwater.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from headwater.config.run import RunConfig


def model_codec(config: RunConfig, tokenizer: Path | None, end: int | str | None = None) -> Codec:
    """Return the tokenizer of a run's model.

    Args:
        config: the run.
        tokenizer: the tokenizer's file or folder; that in the run's folder if not given, or else that in the
            folder of a transformers model.
        end: the end token or its id; found in the tokenizer's files if not given.

    Raises:
        DataError: if the tokenizer is missing.
    """
    prepared = RunDir(config.init.model_dir).prepared_data()
    known = () if prepared is None else (prepared.end_of_text_id,)
    return open_codec(tokenizer_path(config, tokenizer), end, known)


def tokenizer_path(config: RunConfig, tokenizer: Path | None) -> Path:
    """Return the file or the folder of the tokenizer of a run's model; see `model_codec`."""
    run_dir, model = RunDir(config.init.model_dir), config.init.model
    # The run's copy comes first: it belongs to the training data, and the folder may have changed since.
    if tokenizer is None and isinstance(model, HuggingFaceConfig) and not run_dir.tokenizer.is_file():
        return model.hf
    return tokenizer or run_dir.tokenizer
