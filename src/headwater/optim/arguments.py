"""Validation of the arguments that a user gave for a schedule or an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from headwater.core.errors import ConfigError
from headwater.core.names import nearest
from headwater.optim.schedules import Schedule

S = TypeVar("S", bound=Schedule)


def make_schedule(
    kind: type[S],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    names: Mapping[str, str],
    owner: str,
) -> S:
    """Construct a schedule from the user's arguments.

    Args:
        kind: class of the schedule, a dataclass.
        args: the user's positional arguments, in the order of the fields.
        kwargs: the user's keyword arguments, under their public names.
        names: public names of fields of `kind`, where they differ from the field names.
        owner: name of the class or function that the user called, for errors.

    Raises:
        ConfigError: if an argument is unknown, missing, given twice or out of its range.
    """
    fields = {names.get(field.name, field.name): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = _by_name(args, kwargs, list(fields), owner)
    missing = [name for name, field in fields.items() if _is_required(field) and name not in given]
    if missing:
        raise ConfigError(f"{owner} needs {missing[0]}", remedy=_takes(owner, fields))
    try:
        schedule: S = _adapter(kind).validate_python({fields[name].name: v for name, v in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise ConfigError(
            f"{names.get(key, key)} of {owner} is {first['input']!r}: {first['msg'].lower()}",
            remedy=f"change {names.get(key, key)}",
        ) from error
    return schedule


def _by_name(args: Sequence[Any], kwargs: Mapping[str, Any], names: list[str], owner: str) -> dict[str, Any]:
    if len(args) > len(names):
        raise ConfigError(
            f"expected at most {len(names)} arguments of {owner}, got {len(args)}",
            remedy=_takes(owner, names),
        )
    check_names(kwargs, names, owner)
    given = dict(zip(names, args, strict=False))
    twice = given.keys() & kwargs.keys()
    if twice:
        raise ConfigError(
            f"{owner} got {min(twice)} twice", remedy="pass it by position or by name, not both"
        )
    return given | dict(kwargs)


def check_names(given: Iterable[str], valid: Iterable[str], owner: str) -> None:
    """Raise if a name is not an argument of `owner`.

    Args:
        given: names that the user wrote.
        valid: names of the arguments of `owner`.
        owner: name of a class or function, for the error.

    Raises:
        ConfigError: if a name is unknown, with the nearest valid name.
    """
    valid = list(valid)
    for name in given:
        if name not in valid:
            close = nearest(name, valid)
            remedy = f"write {close}; {_takes(owner, valid)}" if close else _takes(owner, valid)
            raise ConfigError(f"{owner} takes no argument {name!r}", remedy=remedy)


def _takes(owner: str, valid: Iterable[str]) -> str:
    return f"{owner} takes {', '.join(valid)}"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
