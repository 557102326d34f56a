"""Export and import of checkpoints in formats of the transformers library, one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.huggingface import CONFIG_FILE
from headwater.config.models.preference import DPOConfig
from headwater.convert.formats import (
    CONVERTERS,
    FORMATS,
    converter_of,
    encoder_alone,
    format_of_config,
    format_of_hf,
)
from headwater.convert.formats.base import Format
from headwater.convert.output import new_folder
from headwater.convert.rules import Mapped, map_parameters, missing, unexpected
from headwater.convert.shards import SHARD_BYTES, ShardWriter, plan_shards, write_index
from headwater.convert.stored import stored_tensors
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.file_tensor import FileTensor
from headwater.core.files import why_unreadable
from headwater.models.decoder_parameters import layer_namings
from headwater.models.lora import is_adapter, merge_adapters
from headwater.models.registry import build_model, init_parameter

_SHARED = ("head.weight", "mlm.output.weight", "text_model.head.weight")
"""Second names, in a `state_dict`, of weights shared with an embedding. An export skips these names."""


def export_hf(
    source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    out_dir: Path,
    *,
    format: Format | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
    tokenizer_files: Sequence[Path] = (),
    end_of_text: int | None = None,
) -> None:
    """Write a checkpoint in the layout of `save_pretrained` of the transformers library.

    One tensor is in memory at a time. The folder appears when it is complete.

    Args:
        source: all parameters by name, in any order; read one at a time.
        config: the model section of the parameters.
        out_dir: output folder, which must be new or empty.
        format: format of the checkpoint; by default that of the model.
        dtype: dtype in the files: fp32, bf16 or fp16.
        max_shard_bytes: maximum size of a weight file; a larger tensor is alone in its file.
        tokenizer_files: files to copy to the output folder.
        end_of_text: id of the end-of-text token, if there is one.

    Raises:
        ConfigError: if no format of the transformers library can express the model.
        CheckpointError: if the folder is not empty, or the tensors are not those of the model.
    """
    pairs = source.items() if isinstance(source, Mapping) else source
    config, pairs = _without_training_parts(config, pairs)
    format = format or format_of_config(config)
    # Before the weights are written: this raises if the format cannot express the model.
    hf = format.config_to_hf(config, end_of_text=end_of_text)
    with new_folder(out_dir) as partial:
        for name in format.folders:
            (partial / name).mkdir()
        _write_weights(pairs, config, format, partial, dtype, max_shard_bytes)
        for name, content in format.by_folder(hf).items():
            content["dtype"] = str(dtype).removeprefix("torch.")
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (partial / name / CONFIG_FILE).write_text(text)
            for file in tokenizer_files:
                shutil.copy(file, partial / name / file.name)


def _without_training_parts(
    config: ModelConfig, pairs: Iterable[tuple[str, Tensor]]
) -> tuple[ModelConfig, Iterable[tuple[str, Tensor]]]:
    """Drop DPO's reference model, which only training needs, and merge adapters into the weights."""
    config, pairs = without_reference(config, pairs)
    if not isinstance(config, DecoderConfig) or config.lora_params is None:
        return config, pairs
    plain = config.model_copy(update={"lora_params": None})
    names = (name for name, _ in build_model(config, device="meta").named_parameters())
    layers = {name.rpartition(".")[0] for name in names if is_adapter(name)}
    return plain, merge_adapters(pairs, config.lora_params, lambda name: layer_namings(name, plain), layers)


def without_reference(
    config: ModelConfig, pairs: Iterable[tuple[str, Tensor]]
) -> tuple[ModelConfig, Iterable[tuple[str, Tensor]]]:
    """Return the policy of a model that DPO trains, with its parameters. Return any other model unchanged."""
    if not isinstance(config, DPOConfig):
        return config, pairs
    prefix = "policy."
    policy = ((name.removeprefix(prefix), tensor) for name, tensor in pairs if name.startswith(prefix))
    return config.policy_model, policy


def import_hf(
    folder: Path, *, config_file: Path | None = None, format: Format | None = None
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """Read a checkpoint: return its model section, and an iterator over (name, parameter); see `open_hf`."""
    found = open_hf(folder, config_file=config_file, format=format)
    return found.config, found.tensors()


def open_hf(folder: Path, *, config_file: Path | None = None, format: Format | None = None) -> Imported:
    """Read the config of a checkpoint in Hugging Face's format; its tensors are read later.

    Args:
        folder: folder written by `save_pretrained`.
        config_file: the model's config, if it is not `config.json` in the folder.
        format: format to import. By default it follows from the config; if the config names an encoder class
            without a head, the head gets random initial values.

    Raises:
        ConfigError: if the config is missing or damaged, or describes another kind of model.
    """
    path = config_file or folder / CONFIG_FILE
    hf = _read_config(path) if path.is_file() or config_file else read_config(folder)
    found = format_of_hf(hf, where=str(path))
    if format is not None and not _is_of(hf, format, found):
        raise ConfigError(
            f"expected the config of a {format.architecture}, got that of a {found.architecture}",
            where=str(path),
            remedy=f"convert it with --model {converter_of(found)}",
        )
    format = format or encoder_alone(hf, found)
    with _config_errors(path):
        config = format.config_from_hf(hf, where=str(path))
        # In the same context: some wrong sizes are only noticed when the model is built.
        mapped = map_model(config, format)
    return Imported(config, format, mapped, folder)


@dataclasses.dataclass(frozen=True)
class Imported:
    """A checkpoint in Hugging Face's format, opened for import.

    Attributes:
        config: the model section.
        format: format of the checkpoint.
        mapped: every parameter of the model by name, with the stored tensors that hold it.
        folder: folder of the checkpoint.
    """

    config: ModelConfig
    format: Format
    mapped: Mapping[str, Mapped]
    folder: Path

    @property
    def drawn(self) -> list[str]:
        """Names of the parameters that are not in the checkpoint and get random initial values."""
        return [each.name for each in self.mapped.values() if not each.theirs]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name in our model and the value of each parameter. Raises the errors of `readers`."""
        for name, read in self.readers().items():
            yield name, read()

    def readers(self) -> dict[str, Callable[[], Tensor]]:
        """Return, by name in our model, a function that returns the value of the parameter.

        Raises:
            CheckpointError: if a tensor is missing or unknown; the functions raise it if a file is damaged or
                a tensor has an unexpected shape.
        """
        return _readers(self.config, self.format, self.folder, self.mapped)

    def stored(self) -> dict[str, Callable[[], Tensor]]:
        """Return, by name in our model, a function that reads the parameter, for each one in the checkpoint.

        Parameters that the checkpoint lacks are left out. Tensors that belong to no parameter are included
        under their own names, unless the format says that they hold no weights.

        Raises:
            CheckpointError: if a file is damaged.
        """
        expected = dict.fromkeys(name for each in self.mapped.values() for name in each.theirs)
        places = _places(self.config, self.format, self.folder, expected)
        unknown = {name: stored.read for name, stored in places.items() if name not in expected}
        known = {
            each.name: partial(joined, each, places, str(self.folder))
            for each in self.mapped.values()
            if each.theirs and all(name in places for name in each.theirs)
        }
        return known | unknown


@contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    """Inside the context, turn exceptions that a wrong value in `config.json` causes into a `ConfigError`."""
    try:
        yield
    except _WRONG_VALUES as error:
        raise ConfigError(
            f"a value in the model's config is missing or wrong: {type(error).__name__}: {error}",
            where=str(path),
            remedy="copy the file again",
        ) from error


_WRONG_VALUES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip


def _read_config(path: Path) -> dict[str, Any]:
    remedy = "name a folder that was written by save_pretrained"
    if not path.exists():
        what = "the folder has no config.json" if path.parent.is_dir() else "the folder does not exist"
        raise ConfigError(what, where=str(path.parent), remedy=remedy)
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the model's config cannot be read: {why_unreadable(error)}", where=str(path), remedy=remedy
        ) from error
    if not isinstance(hf, dict):
        raise ConfigError(f"expected a JSON object, got {type(hf).__name__}", where=str(path), remedy=remedy)
    return hf


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `config.json`; for a model in several folders, all of them merged.

    Raises:
        ConfigError: if the file is missing or does not hold a JSON object.
    """
    for format in FORMATS:
        files = {name: folder / name / CONFIG_FILE for name in format.folders}
        if files and all(file.is_file() for file in files.values()):
            parts = {name: _read_config(file) for name, file in files.items()}
            return {"model_type": format.model_type, "architectures": [format.architecture], **parts}
    return _read_config(folder / CONFIG_FILE)


def _is_of(hf: Mapping[str, Any], format: Format, found: Format) -> bool:
    """True if a `config.json` that names the format `found` can also be read as `format`."""
    names_it = found.architecture in (hf.get("architectures") or ())
    return format.model_type == found.model_type and (
        not names_it or format.architecture == found.architecture
    )


def _write_weights(
    pairs: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    format: Format,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    mapped = map_model(config, format)
    layout = {
        name: (dtype, shape)
        for each in mapped.values()
        for name, shape in zip(each.theirs, each.their_shapes(), strict=True)
    }
    planned = {
        part: plan_shards({n: kind for n, kind in layout.items() if n.startswith(part)}, max_shard_bytes)
        for part in format.folders or ("",)
    }
    below = [
        dataclasses.replace(shard, file=str(Path(part) / shard.file))
        for part, shards in planned.items()
        for shard in shards
    ]
    # A state_dict has a shared weight under two names; the second one is skipped.
    own = (pair for pair in pairs if pair[0] in mapped or pair[0] not in _SHARED)
    with ShardWriter(folder, below) as writer:
        for each, tensor in _checked(own, mapped):
            for name, value in zip(each.theirs, each.rule.split(tensor), strict=True):
                writer.write(name, value)
    for part, shards in planned.items():
        write_index(folder / part, shards)


def _checked(
    pairs: Iterable[tuple[str, Tensor]], mapped: Mapping[str, Mapped]
) -> Iterator[tuple[Mapped, Tensor]]:
    """Yield `pairs`, with the mapping of each. Raise unless each parameter of the model occurs once.

    Raises:
        CheckpointError: if a tensor is unknown, repeated or missing, or has an unexpected shape.
    """
    where, absent = "the exported parameters", set(mapped)
    for name, tensor in pairs:
        if name not in mapped:
            raise unexpected(name, mapped, where)
        if name not in absent:
            raise CheckpointError(
                f"tensor {name} occurs twice", where=where, remedy="pass each parameter once"
            )
        if tuple(tensor.shape) != mapped[name].shape:
            raise _misshapen(name, tensor.shape, mapped[name].shape, where)
        absent.remove(name)
        yield mapped[name], tensor
    if absent:
        raise missing(absent, where)


def _readers(
    config: ModelConfig, format: Format, folder: Path, mapped: Mapping[str, Mapped]
) -> dict[str, Callable[[], Tensor]]:
    where = str(folder)
    expected = dict.fromkeys(name for each in mapped.values() for name in each.theirs)
    places = _places(config, format, folder, expected)
    unknown = next((name for name in places if name not in expected), None)
    if unknown is not None:
        raise unexpected(unknown, expected, where)
    if absent := [name for name in expected if name not in places]:
        headless = f"{converter_of(format)}-headless"
        if headless in CONVERTERS and all(
            name.startswith((f"{format.head}.", *format.others)) for name in absent
        ):
            raise CheckpointError(
                f"the checkpoint has no head: it lacks {', '.join(absent)}",
                where=where,
                remedy=f"convert it with --model {headless}, which gives the head random initial values",
            )
        raise missing(absent, where)
    return {
        each.name: partial(joined, each, places, where)
        if each.theirs
        else partial(init_parameter, each.name, each.shape, config, seed=0)
        for each in mapped.values()
    }


def joined(each: Mapped, places: Mapping[str, FileTensor], where: str) -> Tensor:
    """Read the stored tensors that hold a parameter, and return the parameter made of them.

    Raises:
        CheckpointError: if a tensor has an unexpected shape.
    """
    tensors = []
    for name, shape in zip(each.theirs, each.their_shapes(), strict=True):
        stored = places[name]
        if stored.shape != shape:
            raise _misshapen(stored.name, stored.shape, shape, where)
        tensors.append(stored.read())
    return each.rule.join(tensors)


def _places(
    config: ModelConfig, format: Format, folder: Path, expected: Collection[str]
) -> dict[str, FileTensor]:
    """Return full name -> stored tensor. Unknown tensors that hold no weights are left out."""
    head, tied = f"{format.head}.weight", getattr(config, "share_embedding_weights", False)
    places = {}
    for stored in (each for part in format.folders or ("",) for each in stored_tensors(folder / part)):
        name = stored.name
        # A tensor that a parameter needs counts, even if its name has one of these suffixes.
        if name not in expected and (name.endswith(format.ignored) or (name == head and tied)):
            continue
        known = name.startswith((format.prefix, f"{format.head}.", *format.others))
        full = name if known else f"{format.prefix}{name}"
        places[_current_name(full)] = stored
    return places


def _current_name(name: str) -> str:
    """Return the present name of a tensor from an old checkpoint, which named norms and CLIP differently."""
    name = name.replace("vision_tower.vision_model.", "vision_tower.")
    return re.sub(
        r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    )


def _misshapen(name: str, shape: Sequence[int], expected: Sequence[int], where: str) -> CheckpointError:
    return CheckpointError(
        f"expected tensor {name} of shape {tuple(expected)}, as in the model's config; got {tuple(shape)}",
        where=where,
        remedy="check that the model's config belongs to the checkpoint",
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name; shared parameters only under their first name."""
    model = build_model(config, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def map_model(config: ModelConfig, format: Format) -> dict[str, Mapped]:
    """Return every parameter of a model by name, with the tensors of a format that hold it."""
    return map_parameters(parameter_shapes(config), format.rules(config))
