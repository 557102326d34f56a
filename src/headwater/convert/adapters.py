"""Export of low-rank adapters in the format of the peft library, without the weights of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.lora import LoRAConfig
from headwater.convert.checkpoint import map_model, without_reference
from headwater.convert.formats import format_of_config
from headwater.convert.output import new_folder
from headwater.convert.rules import Mapped, missing
from headwater.convert.shards import Shard, ShardWriter
from headwater.core.errors import ConfigError
from headwater.models.layers.lora import LoRALinear
from headwater.models.lora import is_adapter
from headwater.models.registry import build_model

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


class _Adapter(NamedTuple):
    """The adapter of one matrix in the transformers library's model: it adds `scale · B·A`.

    Attributes:
        module: name of the module that has the matrix.
        a: A, [rank, inputs].
        b: B, [outputs, rank].
    """

    module: str
    a: Tensor
    b: Tensor


def export_adapters(
    source: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the adapters of a model as `PeftModel.from_pretrained` reads them.

    They belong to the model that `export_hf` writes for the checkpoint that training started from. The folder
    appears when it is complete.

    Args:
        source: all parameters by name, in any order. Only the adapters are kept in memory.
        config: the model section of the parameters.
        out_dir: output folder, which must be new or empty.
        dtype: dtype in the file: fp32, bf16 or fp16.

    Raises:
        ConfigError: if the model has no adapters, or the transformers library has no such model.
        CheckpointError: if the folder is not empty, or an adapter is missing.
    """
    config, pairs = without_reference(config, source)
    if not isinstance(config, DecoderConfig) or config.lora_params is None:
        raise ConfigError(
            "the model has no adapters",
            where="model.lora_params",
            remedy="export the whole model: leave out --adapters",
        )
    plain = config.model_copy(update={"lora_params": None})
    mapped = map_model(plain, format_of_config(plain))
    layers = _adapted_layers(config)
    tensors = {name: tensor for name, tensor in pairs if is_adapter(name)}
    names = (f"{name}.{kind}" for name in layers for kind in ("lora_a", "lora_b"))
    if absent := [name for name in names if name not in tensors]:
        raise missing(absent, "the exported parameters")
    adapters, transposes = [], False
    for name, layer in layers.items():
        whole = mapped[f"{name}.weight"]
        adapters += _divided(layer, whole, tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"])
        transposes = transposes or _is_transposed(whole)
    with new_folder(out_dir) as folder:
        _write_weights(adapters, folder, dtype)
        content = _config_of(adapters, config.lora_params, transposes=transposes)
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _adapted_layers(config: ModelConfig) -> dict[str, LoRALinear]:
    """Return the layers that have adapters by name, without values."""
    modules = build_model(config, device="meta").named_modules()
    return {name: module for name, module in modules if isinstance(module, LoRALinear)}


def _divided(layer: LoRALinear, whole: Mapped, a: Tensor, b: Tensor) -> list[_Adapter]:
    """Return the adapters of the library's matrices that are stacked in the weight of a layer.

    The rule that converts the weight selects, permutes or scales rows. So that it can convert all B at once,
    they are the diagonal blocks of a matrix with a row for each output. A is not converted. If one
    matrix of the library has rows of several adapters, it gets one adapter of their total rank.

    Args:
        layer: the layer.
        whole: the layer's weight, with the rule that converts it.
        a: all A of the layer, stacked.
        b: all B of the layer, stacked.
    """
    rank, count = b.shape[1], len(layer.rows)
    blocks = b.new_zeros(layer.out_features, count * rank)
    present = torch.zeros(layer.out_features, count)
    for index, (rows, part) in enumerate(zip(layer.rows, b.split(layer.sizes), strict=True)):
        blocks[rows, index * rank : (index + 1) * rank] = part
        present[rows, index] = 1
    adapters = []
    for name, their_blocks, their_present in zip(
        whole.theirs, _split(whole, blocks), _split(whole, present), strict=True
    ):
        used = their_present.any(0)
        if used.any():
            columns = used.repeat_interleave(rank)
            adapters.append(_Adapter(name.removesuffix(".weight"), a[columns], their_blocks[:, columns]))
    return adapters


def _split(whole: Mapped, rows: Tensor) -> list[Tensor]:
    """Convert a matrix with a row for each output as the weight is converted, but never transpose it."""
    parts = whole.rule.split(rows)
    return [part.t() for part in parts] if _is_transposed(whole) else list(parts)


def _is_transposed(whole: Mapped) -> bool:
    """True if the library stores the weight as [inputs, outputs]."""
    outputs = whole.shape[0]
    # With more columns than rows, the shape of the result shows whether the rule transposes.
    first = whole.rule.split(torch.empty(outputs, outputs + 1, device="meta"))[0]
    return first.shape[0] == outputs + 1


def _write_weights(adapters: Iterable[_Adapter], folder: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"base_model.model.{adapter.module}.lora_{which}.weight": tensor
        for adapter in adapters
        for which, tensor in (("A", adapter.a), ("B", adapter.b))
    }
    layout = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with ShardWriter(folder, [Shard(WEIGHTS_FILE, layout)]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def _config_of(adapters: Iterable[_Adapter], config: LoRAConfig, *, transposes: bool) -> Mapping[str, Any]:
    """Return the content of `adapter_config.json`."""
    others = {adapter.module: len(adapter.a) for adapter in adapters if len(adapter.a) != config.r}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": transposes,
        "target_modules": [adapter.module for adapter in adapters],
        "rank_pattern": others,
        # The library divides alpha by the rank of each adapter. The quotient is the same for all of them.
        "alpha_pattern": {name: config.alpha * rank / config.r for name, rank in others.items()},
    }
