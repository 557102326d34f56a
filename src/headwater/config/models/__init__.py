"""The schema of the section `model`: a class for each model family, selected by the model's name."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field

from headwater.config.base import Reads, Section
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.diffusion import DiTConfig
from headwater.config.models.encoder import (
    BertConfig,
    ClassifierConfig,
    DPRConfig,
    ExtractiveSummarizationConfig,
    QuestionAnsweringConfig,
    TokenClassifierConfig,
)
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.models.multimodal import LlavaConfig, MultimodalSimpleConfig
from headwater.config.models.preference import DPOConfig
from headwater.config.models.self_supervised import DinoConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.config.models.vision import FCMnistConfig, UNetConfig, ViTConfig

ModelConfig = (
    DecoderConfig
    | BertConfig
    | ClassifierConfig
    | TokenClassifierConfig
    | ExtractiveSummarizationConfig
    | QuestionAnsweringConfig
    | DPRConfig
    | FCMnistConfig
    | ViTConfig
    | UNetConfig
    | DiTConfig
    | DinoConfig
    | Seq2SeqConfig
    | DPOConfig
    | LlavaConfig
    | MultimodalSimpleConfig
    | HuggingFaceConfig
)
"""Any model section."""


def named(section: Any) -> Any:
    """Add `name: hf` to a model section that has the key `hf` but no name."""
    if isinstance(section, dict) and "hf" in section and "name" not in section:
        return {"name": "hf", **section}
    return section


AnyModel = Annotated[ModelConfig, Field(discriminator="name"), Reads(named, lambda schema: schema)]
"""The type of a model section in a params file. `name` selects the class."""


def _names(schema: type[Section]) -> tuple[str, ...]:
    names: tuple[str, ...] = get_args(schema.model_fields["name"].annotation)
    return names


MODELS: dict[str, type[Any]] = {name: schema for schema in get_args(ModelConfig) for name in _names(schema)}
"""Class of the section `model`, by the model's name. A new family needs a class in `ModelConfig`."""
