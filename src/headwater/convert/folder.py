"""Checkpoints in this package's own names: safetensors files with the model's section beside them."""

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
from headwater.convert.shards import ShardWriter, plan_shards, read_tensors, write_index
from headwater.core.errors import ConfigError

MODEL_FILE = "model.yaml"
"""Holds the model's section."""


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    config: ModelConfig,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
    beside: Sequence[Path] = (),
) -> None:
    """Write a folder that a params file can name as `ckpt_path`; it appears when everything is in it.

    Args:
        tensors: names and tensors, in any order; read one at a time.
        shapes: shapes of all of them.
        config: the model.
        out_dir: a folder that does not exist yet, or is empty.
        dtype: dtype in the files.
        max_shard_bytes: size at which a further file begins.
        beside: files to copy beside the weights.

    Raises:
        CheckpointError: if the folder is not empty, or a tensor is not as `shapes` says.
    """
    shards = plan_shards({name: (dtype, shape) for name, shape in shapes.items()}, max_shard_bytes)
    with new_folder(out_dir) as partial:
        with ShardWriter(partial, shards) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
        write_index(partial, shards)
        section = config.model_dump(mode="json", exclude_unset=True) | {"name": config.name}
        (partial / MODEL_FILE).write_text(yaml.safe_dump(section, sort_keys=False))
        for file in beside:
            shutil.copy(file, partial / file.name)


def read_folder(folder: Path) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """The model's section and, one at a time, the tensors of what `write_folder` has written.

    Raises:
        ConfigError: if the section is missing or wrong.
        CheckpointError: while iterating, if a file is damaged.
    """
    return read_model_section(folder / MODEL_FILE), read_tensors(folder)


def read_model_section(path: Path) -> ModelConfig:
    """The model's section in a file of its own, or in a params file.

    Raises:
        ConfigError: if it is missing or wrong.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"cannot read the model's section: {error}", where=str(path), remedy="name a folder that has one"
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
            remedy="correct the model's section",
        ) from error
    return model
