"""What every section of a params file has in common: frozen, strictly typed, no unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headwater.core.errors import ConfigError
from headwater.core.units import parse_bytes


@dataclasses.dataclass(frozen=True)
class NoEffect:
    """Marks a key that is accepted for compatibility and changes nothing here.

    Attributes:
        why: what a user should know, a clause that follows the key in a notice.
    """

    why: str


JsonSchema = dict[str, Any]
"""A JSON Schema, or a part of it."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """A conversion that a value goes through before its type is checked.

    Attributes:
        convert: returns the value that is checked.
        accepts: from the JSON Schema of the type, returns that of the values that may be written.
    """

    convert: Callable[[Any], Any]
    accepts: Callable[[JsonSchema], JsonSchema]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.accepts(handler(schema))


class Section(BaseModel):
    """One mapping of a params file. Unknown keys and wrong types are errors, values are never coerced."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(),
        validate_by_name=False, validate_by_alias=True,
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        valid = cls.attributes()
        unknown = [key for key in data if key not in valid] if isinstance(data, dict) else []
        if unknown:
            raise PydanticCustomError(
                "unknown_key", "unknown key", {"key": unknown[0], "valid": sorted(valid)}
            )
        return data

    @classmethod
    def attributes(cls) -> dict[str, str]:
        """The attribute that holds each key; they differ where the key cannot be a name in Python."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}

    def notices(self) -> Iterator[tuple[str, str]]:
        """Each key that was given and has no effect, with what to know about it."""
        for key, name in self.attributes().items():
            for mark in self.__class__.model_fields[name].metadata:
                if isinstance(mark, NoEffect) and name in self.model_fields_set:
                    yield key, mark.why


class Choice(Section):
    """A mapping with one key, the name of one of the alternatives: `{AdamW: {...}}`.

    Every alternative is a field that may be absent. Names are matched without regard to case.
    """

    @model_validator(mode="before")
    @classmethod
    def _canonical_names(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {data: {}}
        if not isinstance(data, dict):
            return data
        names = {key.lower(): key for key in cls.attributes()}
        data = {names.get(str(key).lower(), key): value for key, value in data.items()}
        given = [key for key, value in data.items() if value is not None]
        if len(given) > 1:
            raise PydanticCustomError("choice", "expected one name, found {names}", {"names": given})
        return data

    @property
    def chosen(self) -> Section | None:
        """The alternative that was given; `None` where it was set to null."""
        values = (getattr(self, name) for name in self.attributes().values())
        return next((value for value in values if value is not None), None)


_LONGEST_NAME = 100
"""Characters of a word that are compared with names; difflib is quadratic."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `word`, if any is."""
    names = {name.lower(): name for name in valid}
    word = word[:_LONGEST_NAME].lower()
    if _USUAL.get(word) in names:
        return names[_USUAL[word]]
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if matches:
        return names[matches[0]]
    longer = [name for name in names if len(word) > 3 and name.startswith(word)]
    return names[min(longer, key=len)] if longer else None


_USUAL = {
    "lr": "learning_rate", "wd": "weight_decay", "epochs": "num_epochs", "bs": "batch_size",
    "num_layers": "num_hidden_layers", "n_layer": "num_hidden_layers", "n_embd": "hidden_size",
    "num_attention_heads": "num_heads", "n_head": "num_heads", "intermediate_size": "filter_size",
    "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "nonlinearity",
    "max_sequence_length": "max_position_embeddings", "tie_word_embeddings": "share_embedding_weights",
}  # fmt: skip
"""What other programs call some keys."""


def _bytes(value: Any) -> Any:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return parse_bytes(value)
        except ConfigError as error:
            raise PydanticCustomError(
                "size", "{what}", {"what": error.what, "remedy": error.remedy}
            ) from error
    return value


def _path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise PydanticCustomError("size", "a path has no NUL characters")
    return expand_user(Path(os.path.expandvars(value)))


def expand_user(path: Path) -> Path:
    """Return `path` with the home folder for `~`; unchanged if the user does not exist."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_or_more(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def any_case(names: Iterable[str]) -> str:
    """Return a regular expression that matches each of `names` without regard to case."""
    spelled = (
        "".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else re.escape(c) for c in name) for name in names
    )
    return f"^({'|'.join(spelled)})$"


ALSO = "also"
"""Key of a JSON Schema in the making: further names of keys and of values of `name`, by the usual ones."""


def also(keys: Mapping[str, str], names: Mapping[str, str]) -> Callable[[JsonSchema], JsonSchema]:
    """Return what lets the schema of a section accept other names for some keys, and other `name`s."""
    return lambda schema: schema | {ALSO: {"keys": dict(keys), "names": list(names)}}


def _or_text(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema | {"type": "number"}, {"type": "string"}]}


def _or_item(schema: JsonSchema) -> JsonSchema:
    """Return the schema of a list, or of a value that stands for a list of one."""
    return {"anyOf": [schema, schema.get("items", {})]}


def _as_it_is(schema: JsonSchema) -> JsonSchema:
    return schema


Bytes = Annotated[int, Field(ge=1), Reads(_bytes, _or_text)]
"""A size: `8GiB`, `500MB` or a number of bytes."""
FilePath = Annotated[Path, Reads(_path, _as_it_is)]
AsTuple = Reads(_tuple, _as_it_is)
"""Reads a list into a tuple."""
OneOrMore = Reads(_one_or_more, _or_item)
"""Reads a single value like a list of one."""
