"""Models of a Hugging Face folder, with random inputs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from headwater.conform.subject import Subject, fused_adamw, loss_of_outputs
from headwater.core.errors import CheckpointError, ConfigError, ModelError
from headwater.core.packages import importing

_BATCHES, _SAMPLES, _TOKENS = 4, 2, 16


def load_pretrained_subject(folder: Path) -> Subject:
    """Return the model of a folder, in training mode and fp32, with random inputs.

    Raises:
        ConfigError: if transformers is missing, cannot use the folder's `config.json`, or has no class of the
            name in it.
        CheckpointError: if transformers cannot load the weights.
        ModelError: if the inputs of the class are not known.
    """
    with importing("a Hugging Face folder", "hf"):
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # for a file that it cannot use, the library can raise any exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"transformers {transformers.__version__} cannot use this config.json: {lines[0]}",
            where=str(folder / "config.json"),
            remedy="write a factory in a Python module: MODULE:FACTORY",
        ) from error
    names = getattr(config, "architectures", None) or []
    kind: Any = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if kind is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no class {names[0]}",
            where=str(folder / "config.json"),
            remedy="write a factory in a Python module: MODULE:FACTORY",
        )
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        try:
            model = kind.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # for damaged weights the library can raise any exception
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"transformers {transformers.__version__} cannot load these weights: {lines[0]}",
                where=str(folder),
                remedy="save the model again with save_pretrained",
            ) from error
    elif kind is transformers.AutoModel:
        model = kind.from_config(config)
    else:
        model = kind(config)
    # `from_pretrained` returns a model in eval mode.
    model.train()
    return Subject(model, [_batch(model, step) for step in range(_BATCHES)], loss_of_outputs, fused_adamw)


def _batch(model: Any, step: int) -> dict[str, torch.Tensor]:
    """Return random inputs of a model.

    Raises:
        ModelError: if its main input is not tokens or pictures.
    """
    generator = torch.Generator().manual_seed(step)
    config = model.config.get_text_config()
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    if main == "input_ids":
        tokens = torch.randint(3, config.vocab_size, (_SAMPLES, _TOKENS), generator=generator)
        batch = {"input_ids": tokens}
        if "decoder_input_ids" in accepted:
            batch["decoder_input_ids"] = tokens.flip(1)
        if "labels" in accepted and type(model).__name__.endswith(("LMHeadModel", "ForCausalLM")):
            batch["labels"] = tokens
        return batch
    if main == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        shape = (_SAMPLES, getattr(model.config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    raise ModelError(
        f"expected a model of input_ids or pixel_values, found one of {main}",
        where=type(model).__name__,
        remedy="write a factory in a Python module that returns model, [batch, …]: MODULE:FACTORY",
    )
