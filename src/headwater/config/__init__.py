"""Params files: reading, conversion from older forms, and a strict schema of the newest form."""

from headwater.config.files import find_params, shipped_params
from headwater.config.models import MODELS, ModelConfig
from headwater.config.models.common import InitializerConfig
from headwater.config.models.decoder import DecoderConfig
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
