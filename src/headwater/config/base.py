"""The base classes of the sections of a params file: frozen, strictly typed, without unknown keys."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headwater.config.origins import KeyPath
from headwater.core import names
from headwater.core.errors import ConfigError
from headwater.core.units import parse_bytes


@dataclasses.dataclass(frozen=True)
class NoEffect:
    """A mark on a key that is accepted for compatibility and has no effect.

    Attributes:
        why: the reason, a clause that follows the key in a notice.
    """

    why: str


JsonSchema = dict[str, Any]
"""A JSON Schema, or a part of it."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """A conversion of the value of a key, which runs before the type of the value is checked.

    Attributes:
        convert: converts the value in the file to the value that is checked.
        accepts: converts the JSON Schema of the type to the schema of the values allowed in the file.
    """

    convert: Callable[[Any], Any]
    accepts: Callable[[JsonSchema], JsonSchema]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.convert, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.accepts(handler(schema))


class SectionError(ValueError):
    """An error about several keys of a section, with a remedy that the message alone does not show.

    For other errors, `config.problems` makes the remedy from the keys that the message names.

    Args:
        what: what was expected and found.
        remedy: what to write.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Section(BaseModel):
    """A mapping in a params file. Unknown keys and wrong types are errors; types are never coerced."""

    # `defer_build`: building all checks takes 0.2 s, and a command needs those of few sections.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(),
        validate_by_name=False, validate_by_alias=True, defer_build=True,
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        valid = cls.attributes()
        # pydantic's own error for an unknown key does not list the valid ones.
        unknown = [key for key in data if key not in valid] if isinstance(data, dict) else []
        if unknown:
            raise PydanticCustomError(
                "unknown_key", "unknown key", {"key": unknown[0], "valid": sorted(valid)}
            )
        return data

    @classmethod
    def attributes(cls) -> dict[str, str]:
        """Return key -> name of its attribute, which is another one if the key is not a valid Python name."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}

    @classmethod
    def no_effect(cls, name: str) -> NoEffect | None:
        """Return the mark of an attribute whose key has no effect; `None` for other attributes."""
        return next((mark for mark in cls.model_fields[name].metadata if isinstance(mark, NoEffect)), None)

    def ignored(self) -> Iterator[tuple[str, str]]:
        """Yield each given key that never has an effect, with the reason."""
        for key, name in self.attributes().items():
            mark = self.no_effect(name)
            if mark is not None and name in self.model_fields_set:
                yield key, mark.why

    def notices(self) -> Iterator[tuple[str, str]]:
        """Yield each given key that has no effect in this section, with the reason."""
        yield from self.ignored()

    def sections(self, location: KeyPath = ()) -> Iterator[tuple[KeyPath, Section]]:
        """Yield this section and all sections in it, each with its location: keys and positions in lists."""
        yield location, self
        for key, name in self.attributes().items():
            value = getattr(self, name)
            entries = enumerate(value) if isinstance(value, tuple) else ((None, value),)
            for index, entry in entries:
                if isinstance(entry, Section):
                    inside = (*location, key) if index is None else (*location, key, index)
                    yield from entry.sections(inside)


class Choice(Section):
    """A mapping with a single key, the name of one of several alternatives: `{AdamW: {...}}`.

    Each alternative is an optional field. Names are matched in any case.
    """

    @model_validator(mode="before")
    @classmethod
    def _canonical_names(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {data: {}}
        if not isinstance(data, dict):
            return data
        names = {key.lower(): key for key in cls.attributes()}
        # Before the names become canonical: `AdamW` and `adamw` would become one key.
        given = [key for key, value in data.items() if value is not None]
        if len(given) > 1:
            raise PydanticCustomError("choice", "expected one name, got {names}", {"names": given})
        return {names.get(str(key).lower(), key): value for key, value in data.items()}

    @property
    def chosen(self) -> Section | None:
        """The section under the one key that was given; `None` if it is null."""
        values = (getattr(self, name) for name in self.attributes().values())
        return next((value for value in values if value is not None), None)


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to `word`, or `None` if none is similar."""
    valid, word = list(valid), word.lower()
    if _USUAL.get(word) in valid:
        return _USUAL[word]
    longer = [name for name in valid if len(word) > 3 and name.lower().startswith(word)]
    return names.nearest(word, valid) or min(longer, key=len, default=None)


_USUAL = {
    "lr": "learning_rate", "wd": "weight_decay", "epochs": "num_epochs", "bs": "batch_size",
    "num_layers": "num_hidden_layers", "n_layer": "num_hidden_layers", "n_embd": "hidden_size",
    "num_attention_heads": "num_heads", "n_head": "num_heads", "intermediate_size": "filter_size",
    "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "nonlinearity",
    "max_sequence_length": "max_position_embeddings", "tie_word_embeddings": "share_embedding_weights",
}  # fmt: skip
"""Names that other programs use for some keys."""


def parsed(parse: Callable[[Any], Any], value: Any) -> Any:
    """Return `parse(value)`; a `ConfigError` becomes a problem of the value, with the same remedy."""
    try:
        return parse(value)
    except ConfigError as error:
        raise PydanticCustomError("size", "{what}", {"what": error.what, "remedy": error.remedy}) from error


def _bytes(value: Any) -> Any:
    is_size = isinstance(value, str | int | float) and not isinstance(value, bool)
    return parsed(parse_bytes, value) if is_size else value


def _path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # `open` would raise `ValueError`, without the place in the file.
    if "\0" in value:
        raise PydanticCustomError("size", "a path must not contain null characters")
    expanded = os.path.expandvars(value)
    if not expanded:  # it would be the current folder
        remedy = "write a path; a dot is the current folder"
        raise PydanticCustomError("size", "expected a path, got an empty text", {"remedy": remedy})
    return expand_user(Path(expanded))


def expand_user(path: Path) -> Path:
    """Return `path` with `~` replaced by the home folder; unchanged if the user does not exist."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_or_more(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def any_case(names: Iterable[str]) -> str:
    """Return a regular expression that matches each of `names` in any case."""
    # Letter by letter: patterns of JSON Schema have no flag that ignores case.
    spelled = (
        "".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else re.escape(c) for c in name) for name in names
    )
    return f"^({'|'.join(spelled)})$"


ALSO = "also"
"""Temporary key of a JSON Schema that holds further names of keys, and further values of `name`."""


def also(keys: Mapping[str, str], names: Mapping[str, str]) -> Callable[[JsonSchema], JsonSchema]:
    """Return a function that makes the schema of a section accept further names of keys and of models.

    Args:
        keys: further names of keys, with the usual names.
        names: further values of the key `name`, with the usual values.
    """
    return lambda schema: schema | {ALSO: {"keys": dict(keys), "names": list(names)}}


def _or_text(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema | {"type": "number"}, {"type": "string"}]}


def _or_item(schema: JsonSchema) -> JsonSchema:
    """Return the schema of a list, or of a single value that stands for a list with one entry."""
    options = schema.get("anyOf", [schema])  # a list that may be left out is a list or null
    items = [each.get("items", {}) for each in options if each.get("type") == "array"]
    return {"anyOf": [*options, *items]}


def _as_it_is(schema: JsonSchema) -> JsonSchema:
    return schema


Bytes = Annotated[int, Field(ge=1), Reads(_bytes, _or_text)]
"""A size: `8GiB`, `500MB` or a number of bytes."""
FilePath = Annotated[Path, Reads(_path, _as_it_is)]
AsTuple = Reads(_tuple, _as_it_is)
"""Converts a list to a tuple."""
OneOrMore = Reads(_one_or_more, _or_item)
"""Converts a list or a single value to a tuple."""
