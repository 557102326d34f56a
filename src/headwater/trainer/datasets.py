"""From the data sections of a params file to loaders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.config.models import ModelConfig
from headwater.config.sections import DataConfig
from headwater.core.errors import ConfigError

if TYPE_CHECKING:
    from headwater.data.reader import GptHDF5DataProcessor


def open_data(config: DataConfig, model: ModelConfig, *, seed: int, repeat: bool) -> GptHDF5DataProcessor:
    """The data set that `config` names, checked against the model.

    Args:
        config: the section of the params file.
        model: the model that will read the data.
        seed: shuffles where the section has no seed of its own.
        repeat: endless passes, for training; otherwise each iteration is one pass.

    Raises:
        ConfigError: if h5py is not installed.
        DataError: if the data are missing, malformed or do not fit the model.
    """
    try:
        from headwater.data.reader import GptHDF5DataProcessor, GptHDF5DataProcessorConfig
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading data needs {error.name}", remedy="pip install 'headwater[data]'"
        ) from error
    keys = GptHDF5DataProcessorConfig(
        data_processor=config.data_processor,
        data_dir=list(config.data_dir),
        batch_size=config.batch_size,
        shuffle=config.shuffle,
        shuffle_seed=seed if config.shuffle_seed is None else config.shuffle_seed,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        persistent_workers=config.persistent_workers,
        drop_last=config.drop_last,
        repeat=repeat,
    )
    return GptHDF5DataProcessor(
        keys, vocab_size=model.vocab_size, max_position_embeddings=model.max_position_embeddings
    )


def find_tokenizer(config: DataConfig) -> Path | None:
    """The tokenizer that `headwater data` left beside the folder of samples, if it did."""
    candidates = (folder.absolute().parent / "tokenizer.json" for folder in config.data_dir)
    return next((path for path in candidates if path.is_file()), None)
