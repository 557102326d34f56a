"""Formats of the transformers library in which our models can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.encoder import BertConfig
from headwater.config.models.vision import ViTConfig
from headwater.convert.formats.alibi import BLOOM, MPT
from headwater.convert.formats.base import Format, headless
from headwater.convert.formats.bert import (
    BERT,
    BERT_CLASSIFIER,
    BERT_QA,
    BERT_SUMMARIZATION,
    BERT_TOKEN_CLASSIFIER,
    DPR,
    ESM,
    ROBERTA,
)
from headwater.convert.formats.bigcode import GPT_BIGCODE
from headwater.convert.formats.falcon import FALCON
from headwater.convert.formats.gpt2 import GPT2, GPT2_MUP, has_scales
from headwater.convert.formats.gptj import CODEGEN, GPTJ
from headwater.convert.formats.jais import BTLM, JAIS
from headwater.convert.formats.llama import GEMMA2, LLAMA, MISTRAL, MIXTRAL
from headwater.convert.formats.llava import LLAVA
from headwater.convert.formats.neox import GPT_NEOX
from headwater.convert.formats.pegasus import PEGASUS
from headwater.convert.formats.t5 import T5
from headwater.convert.formats.vit import DINOV2, VIT
from headwater.core.errors import ConfigError
from headwater.core.names import nearest

FORMATS: tuple[Format, ...] = (
    GPT2, GPTJ, GPT_NEOX, CODEGEN, LLAMA, MISTRAL, MIXTRAL, GEMMA2, FALCON, BLOOM, MPT, GPT_BIGCODE,
    BTLM, JAIS,
    BERT, BERT_CLASSIFIER, BERT_TOKEN_CLASSIFIER, BERT_QA, ROBERTA, ESM, DPR, T5, PEGASUS, VIT, DINOV2, LLAVA,
)  # fmt: skip
"""All formats. The first of several with the same `model_type` is used if a `config.json` names no class."""


_MARK = "-headless"

_NAMES: dict[str, tuple[Format, str]] = {
    **{model: (format, model) for format in FORMATS for model in format.models if "/" not in model},
    "gpt2-mup": (GPT2_MUP, "gpt2"),
    "code-llama": (LLAMA, "llama"),
    "llamaV2": (LLAMA, "llama"),
    "wizardlm": (LLAMA, "llama"),
    "octocoder": (GPT_BIGCODE, "starcoder"),
    "sqlcoder": (GPT_BIGCODE, "starcoder"),
    "wizardcoder": (GPT_BIGCODE, "starcoder"),
    "bert": (BERT, "bert"),
    "bert-sequence-classifier": (BERT_CLASSIFIER, "bert/classifier"),
    "bert-summarization": (BERT_SUMMARIZATION, "bert/extractive_summarization"),
    "bert-token-classifier": (BERT_TOKEN_CLASSIFIER, "bert/token_classifier"),
    "bert-q&a": (BERT_QA, "bert/qa"),
    "roberta": (ROBERTA, "bert"),
    "vision_transformer": (VIT, "vision_transformer"),
    "vit": (VIT, "vision_transformer"),
    "dinov2": (DINOV2, "vision_transformer"),
    "ul2": (T5, "t5"),
    "flan-ul2": (T5, "t5"),
}
_WITH_HEADS = (
    *(format for format in FORMATS if format.schema is DecoderConfig),
    BERT, BERT_CLASSIFIER, BERT_TOKEN_CLASSIFIER, BERT_QA, ROBERTA, ESM, VIT, DINOV2,
)  # fmt: skip
_HEADLESS_FORMATS = {format.architecture: headless(format) for format in _WITH_HEADS}
_HEADLESS = {
    f"{name}-headless": (_HEADLESS_FORMATS[format.architecture], model)
    for name, (format, model) in _NAMES.items()
    if format in _WITH_HEADS
}
CONVERTERS: dict[str, tuple[Format, str]] = dict(sorted({**_NAMES, **_HEADLESS}.items()))
"""Converters by the names that users pass: the format, and the name of our model."""


def converter_of(format: Format) -> str:
    """Return the name of a format's converter that users pass; the first one if there are several."""
    return next(name for name, (other, _) in {**_NAMES, **_HEADLESS}.items() if other is format)


def nearest_converter(name: str) -> str | None:
    """Return the converter whose name is most similar to `name`, or `None`.

    The family is matched first. `-headless` is appended if `name` has a similar ending and the family has
    such a converter.
    """
    family, mark, _ = name.lower().partition(_MARK.removesuffix("less"))
    found = nearest(family, _NAMES)
    return f"{found}{_MARK}" if found and mark and f"{found}{_MARK}" in CONVERTERS else found


def format_of_hf(hf: Mapping[str, Any], *, where: str) -> Format:
    """Return the format that the content of a `config.json` names.

    Args:
        hf: content of `config.json`.
        where: path of the file, for error messages.

    Raises:
        ConfigError: if no format has this `model_type`.
    """
    of_type = [format for format in FORMATS if format.model_type == hf.get("model_type")]
    if not of_type:
        known = sorted({format.model_type for format in FORMATS})
        raise ConfigError(
            f"no converter for the model_type {hf.get('model_type')!r}",
            where=where,
            remedy="to train the library's model unconverted, use `model: {hf: FOLDER}` in the params; "
            f"types that can be converted: {', '.join(known)}",
        )
    names = hf.get("architectures") or ()
    if not isinstance(names, list | tuple):
        raise ConfigError(
            f"expected a list of names in architectures, got {names!r}",
            where=where,
            remedy="copy the file again",
        )
    return next((format for format in of_type if format.architecture in names), of_type[0])


def encoder_alone(hf: Mapping[str, Any], format: Format) -> Format:
    """Return the headless format if `config.json` names the class of the encoder alone, else `format`."""
    alone = _HEADLESS_FORMATS.get(format.architecture)
    if alone is None or format.schema is DecoderConfig:
        return format
    return alone if alone.architecture in (hf.get("architectures") or ()) else format


def format_of_config(config: ModelConfig) -> Format:
    """Return the format in which the model of a params file is stored.

    Raises:
        ConfigError: if the transformers library has no such model.
    """
    if isinstance(config, DecoderConfig) and config.name in GPT2_MUP.models and has_scales(config):
        return GPT2_MUP
    if isinstance(config, BertConfig) and config.mask_padding_in_positional_embed:
        return ROBERTA
    if isinstance(config, ViTConfig) and config.use_dinov2_classifier:
        return DINOV2
    format = next((format for format in FORMATS if config.name in format.models), None)
    if format is None:
        known = sorted({model for format in FORMATS for model in format.models})
        raise ConfigError(
            f"the transformers library has no format for {config.name}",
            where="model.name",
            remedy=f"models that can be exported: {', '.join(known)}",
        )
    return format
