"""Checkpoints in Headwater's own format: safetensors files and a file with the model section."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from headwater.config.models import AnyModel, ModelConfig
from headwater.convert.output import new_folder
from headwater.convert.shards import SHARD_BYTES, ShardWriter, plan_shards, read_tensors, write_index
from headwater.core.errors import ConfigError
from headwater.core.files import why_unreadable

MODEL_FILE = "model.yaml"
"""Name of the file with the model section."""


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    config: ModelConfig,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    beside: Sequence[Path] = (),
) -> None:
    """Write a folder of weights, which `headwater checkpoint import` can read; only a complete one appears.

    Args:
        tensors: names and tensors, in any order; read one at a time.
        shapes: shapes of all tensors by name.
        config: the model section.
        out_dir: output folder, which must be new or empty.
        dtype: dtype in the files.
        beside: files to copy to the output folder.

    Raises:
        CheckpointError: if the folder is not empty, or a tensor does not have the shape in `shapes`.
    """
    shards = plan_shards({name: (dtype, shape) for name, shape in shapes.items()}, SHARD_BYTES)
    with new_folder(out_dir) as partial:
        with ShardWriter(partial, shards) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
        write_index(partial, shards)
        # The name is added, because it selects the schema and may be unset where it has a default.
        section = config.model_dump(mode="json", exclude_unset=True) | {"name": config.name}
        (partial / MODEL_FILE).write_text(yaml.safe_dump(section, sort_keys=False))
        for file in beside:
            shutil.copy(file, partial / file.name)


def read_folder(folder: Path) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """Return the model section, and an iterator over the tensors, of a folder written by `write_folder`.

    Raises:
        ConfigError: if the section is missing or invalid.
        CheckpointError: while iterating, if a file is damaged.
    """
    return read_model_section(folder / MODEL_FILE), read_tensors(folder)


def read_model_section(path: Path) -> ModelConfig:
    """Return the model section of a file that holds only the section, or of a params file.

    Raises:
        ConfigError: if the section is missing or invalid.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"the model section cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="name a folder that holds a model.yaml, or a params file",
        ) from error
    section = content
    for key in ("trainer", "init", "model"):
        section = section.get(key, section) if isinstance(section, dict) else section
    try:
        model: ModelConfig = TypeAdapter(AnyModel).validate_python(section)
    except ValidationError as error:
        details = error.errors()[0]
        raise ConfigError(
            f"{'.'.join(map(str, details['loc']))}: {details['msg']}",
            where=str(path),
            remedy="correct the model section",
        ) from error
    return model
