"""Params files: their schema, which is strict and the same for both forms."""

from headwater.config.files import find_params, shipped_params
from headwater.config.models import MODELS, DecoderConfig, InitializerConfig, ModelConfig
from headwater.config.run import InitConfig, RunConfig, load_params

__all__ = [
    "MODELS",
    "DecoderConfig",
    "InitConfig",
    "InitializerConfig",
    "ModelConfig",
    "RunConfig",
    "find_params",
    "load_params",
    "shipped_params",
]
