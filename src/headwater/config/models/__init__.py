"""What a `model:` section may say, for every model family: one class each, found by the model's name."""

from __future__ import annotations

from headwater.config.models.common import InitializerConfig, InitializerName, Nonlinearity
from headwater.config.models.decoder import FAMILIES as DECODERS
from headwater.config.models.decoder import DecoderConfig

MODELS: dict[str, type[DecoderConfig]] = dict.fromkeys(DECODERS, DecoderConfig)
"""Schema of the `model:` section by the model's name. A family is added by a class and a line here."""

ModelConfig = DecoderConfig
"""Any model section; a union once there are several classes."""

__all__ = [
    "DECODERS",
    "MODELS",
    "DecoderConfig",
    "InitializerConfig",
    "InitializerName",
    "ModelConfig",
    "Nonlinearity",
]
