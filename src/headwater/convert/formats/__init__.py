"""Formats of the transformers library that the models here can be stored in."""

from __future__ import annotations

from headwater.convert.formats.alibi import BLOOM, MPT
from headwater.convert.formats.base import Format
from headwater.convert.formats.bigcode import GPT_BIGCODE
from headwater.convert.formats.falcon import FALCON
from headwater.convert.formats.gpt2 import GPT2
from headwater.convert.formats.gptj import CODEGEN, GPTJ
from headwater.convert.formats.llama import GEMMA2, LLAMA, MISTRAL, MIXTRAL
from headwater.convert.formats.neox import GPT_NEOX
from headwater.core.errors import ConfigError

FORMATS: tuple[Format, ...] = (
    GPT2, GPTJ, GPT_NEOX, CODEGEN, LLAMA, MISTRAL, MIXTRAL, GEMMA2, FALCON, BLOOM, MPT, GPT_BIGCODE,
)  # fmt: skip
"""All of them."""

_BY_TYPE = {format.model_type: format for format in FORMATS}
_BY_MODEL = {model: format for format in FORMATS for model in format.models}


def format_of_type(model_type: object, *, where: str) -> Format:
    """The format that a `config.json` names as its `model_type`.

    Raises:
        ConfigError: if there is none here.
    """
    format = _BY_TYPE.get(str(model_type))
    if format is None:
        raise ConfigError(
            f"model_type is {model_type!r}",
            where=where,
            remedy=f"types that can be converted: {', '.join(sorted(_BY_TYPE))}",
        )
    return format


def format_of_model(name: str) -> Format:
    """The format in which the model family called `name` is stored.

    Raises:
        ConfigError: if the transformers library has no such models.
    """
    format = _BY_MODEL.get(name)
    if format is None:
        raise ConfigError(
            f"there is no format for {name} in the transformers library",
            where="model.name",
            remedy=f"models that have one: {', '.join(sorted(_BY_MODEL))}",
        )
    return format
