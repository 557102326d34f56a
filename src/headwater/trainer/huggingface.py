"""Runs of models of the transformers library: the source of their weights, and their export."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from headwater.api.pretrained import record_pretrained, save_pretrained
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.convert.output import new_folder
from headwater.convert.shards import has_weights
from headwater.convert.stored import PICKLED_FILE
from headwater.core.empty import record_values, recorded_values
from headwater.core.errors import CheckpointError
from headwater.core.lazy import LazyTensor
from headwater.core.side_files import copy_side_files
from headwater.core.stage import ParamSpec
from headwater.core.units import listed
from headwater.models.huggingface import HuggingFaceModel
from headwater.models.registry import build_model, init_parameter
from headwater.store.snapshot_load import SavedCheckpoint

logger = logging.getLogger(__name__)

_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
_LISTED = 6


@final
class LibraryValues:
    """The initial values of a library model: the weights in its folder, or random ones.

    The folder is opened at the first check or value. The model's buffers then get their values too.

    Args:
        model: the model, on the meta device.
        seed: seed of random weights.
    """

    def __init__(self, model: HuggingFaceModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._stored = functools.cache(lambda: _pretrained(model))

    def check(self) -> None:
        """Raise an error if the folder has no readable weights, or weights of another model.

        Raises:
            CheckpointError: if the folder has no such weights.
        """
        self._stored()

    def __call__(self, spec: ParamSpec) -> Tensor:
        stored = self._stored().get(spec.name)
        if stored is None:
            return init_parameter(spec.name, spec.shape, self._model.config, self._seed)
        return stored.clone().to(torch.float32)


def _pretrained(model: HuggingFaceModel) -> dict[str, Tensor]:
    """Return the parameters in a folder of weights, by the model's names; empty if the weights are random.

    Raises:
        CheckpointError: if the folder has no weights that can be read, or these are of another model.
    """
    folder = weights_folder(model.config)
    if folder is None:
        return {}
    report = record_pretrained(model.hf, folder, strict=False)
    prefix = f"{model.hf.base_model_prefix}."
    # Only a head may be missing, because training for another task begins with a random head.
    if lacking := [name for name in report.missing if name.startswith(prefix)]:
        raise CheckpointError(
            f"{len(lacking)} tensors of the model are missing: {listed(lacking, _LISTED)}",
            where=str(folder),
            remedy="name a folder with the weights of this model, or write weights: random",
        )
    if report.missing:
        logger.warning("missing in %s, initialized randomly: %s", folder, listed(report.missing, _LISTED))
    if report.unexpected:
        logger.warning("in %s, but not in the model: %s", folder, listed(report.unexpected, _LISTED))
    found = ((name, recorded_values(parameter)) for name, parameter in model.named_parameters())
    return {name: tensor for name, tensor in found if tensor is not None}


def weights_folder(config: HuggingFaceConfig) -> Path | None:
    """Return the folder whose weights training starts from; `None` if they are random.

    Raises:
        CheckpointError: if the folder has no weights that can be read, although it is named or has files that
            look like weights.
    """
    if config.weights == "random":
        return None
    folder = config.weights or config.hf
    if has_weights(folder) or has_weights(folder, PICKLED_FILE):
        return folder
    other = sorted({path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)})
    if other or config.weights is not None:
        raise CheckpointError(
            f"expected model.safetensors or {PICKLED_FILE}, found {listed(other, _LISTED) or 'no weights'}",
            where=str(folder),
            remedy="save the model with save_pretrained, or write weights: random in the model's section",
        )
    return None


def export_library_model(
    checkpoint: Path, config: HuggingFaceConfig, out_dir: Path, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write a checkpoint of a run as `save_pretrained` of the transformers library does.

    One tensor is in memory at a time. The folder appears when it is complete.

    Args:
        checkpoint: of the run.
        config: the model's section of the params.
        out_dir: the folder to write; new or empty.
        dtype: of the exported weights.

    Raises:
        CheckpointError: if the folder is not empty, or the checkpoint is of another model.
    """
    model = build_model(config, device="meta")
    assert isinstance(model, HuggingFaceModel), "the section builds such a model"
    read = _readers(SavedCheckpoint(checkpoint))
    for name, parameter in model.named_parameters():
        if name not in read:
            raise CheckpointError(
                f"tensor {name} is missing",
                where=str(checkpoint),
                remedy="name a checkpoint of this run",
            )
        record_values(parameter, LazyTensor.whole(read[name], parameter.shape, torch.float32))
    for name, buffer in model.named_buffers():
        if name in read:
            buffer.copy_(read[name]())
    with new_folder(out_dir) as partial:
        save_pretrained(model.hf, partial, dtype=dtype)
        copy_side_files(config.hf, partial)


def _readers(saved: SavedCheckpoint) -> dict[str, Callable[[], Tensor]]:
    """Return a reader for each parameter of a checkpoint, by name."""
    return {
        name: functools.partial(file.read_whole, name) for file in saved.weights() for name in file.places
    }
