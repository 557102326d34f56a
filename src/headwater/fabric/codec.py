"""Encodes messages between ranks as JSON and raw tensors. Sender and receiver both name the value's type.

A message contains neither type names nor code. The receiver names the type that it expects, and any other
content raises an error. `kind` is a type annotation: a plain type, a dataclass, an enum, a union, a literal,
`Any` (any JSON value), or a `list`, `tuple`, `Sequence`, `dict` or `Mapping` of these.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headwater.core.errors import HeadwaterError, RankError, error_class

_HEADER = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 30
_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and re.fullmatch(r"bool|u?int(8|16|32|64)|bfloat16|(float|complex)(8_.*|16|32|64|128)", name)
}
"""Name -> dtype. Quantized dtypes are left out: reading bytes as one of them would crash the process."""


def encode(value: object, kind: Any) -> bytes:
    """Encode a value of type `kind` as a message.

    Raises:
        TypeError: if the value is not of this kind, which is a bug of the caller.
    """
    blobs: list[bytes] = []
    plain = _write(value, kind, blobs)
    header = json.dumps([plain, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(len(header)), header, *blobs])


def decode(message: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Decode a message to a value of type `kind`.

    Raises:
        RankError: if the message does not hold a value of this kind.
    """
    plain, blobs = _split(memoryview(message))
    value = _read(plain, kind, blobs)
    # A sender of another version may add tensors that this version does not read.
    if any(blob is not None for blob in blobs):
        raise _unexpected("no further tensors", "unused tensors")
    return value


def _split(message: memoryview) -> tuple[Any, list[memoryview | None]]:
    """Return the JSON value of a message, and the bytes of its tensors."""
    if len(message) < _HEADER.size:
        raise _unexpected(f"at least {_HEADER.size} bytes", f"{len(message)} bytes")
    (length,) = _HEADER.unpack(message[: _HEADER.size])
    if length > min(len(message) - _HEADER.size, _MAX_HEADER_BYTES):
        raise _unexpected(f"a header of {length} bytes", f"{len(message) - _HEADER.size} bytes")
    position = _HEADER.size + length
    try:
        header = json.loads(bytes(message[_HEADER.size : position]))
    except (ValueError, RecursionError) as error:
        raise _unexpected("JSON", f"something else ({type(error).__name__})") from error
    if not isinstance(header, list) or len(header) != 2 or not isinstance(header[1], list):
        raise _unexpected("a value and the lengths of its tensors", header)
    blobs: list[memoryview | None] = []
    for size in header[1]:
        if type(size) is not int or not 0 <= size <= len(message) - position:
            raise _unexpected("the length of a tensor", size)
        blobs.append(message[position : position + size])
        position += size
    if position != len(message):
        raise _unexpected(f"{position} bytes", f"{len(message)} bytes")
    return header[0], blobs


def _write(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    """Return a value as JSON data, and append the bytes of its tensors to `blobs`."""
    for condition, write, _ in _RULES:
        if condition(kind):
            return write(value, kind, blobs)
    raise TypeError(f"values of type {kind!r} cannot be sent between ranks")


def _read(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    for condition, _, read in _RULES:
        if condition(kind):
            return read(plain, kind, blobs)
    raise TypeError(f"values of type {kind!r} cannot be sent between ranks")


def _unexpected(expected: str, found: object) -> RankError:
    shown = repr(found)
    return RankError(
        f"expected a message with {expected}, got {shown if len(shown) <= 80 else shown[:80] + '…'}",
        remedy="run the same version of the same program on all ranks",
    )


def _wrong(value: object, kind: Any) -> TypeError:
    return TypeError(f"expected {kind!r}, got {type(value).__name__}")


# plain values


_PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    None: (type(None),),
    type(None): (type(None),),
}


def _is_plain(kind: Any) -> bool:
    return isinstance(kind, type | None) and kind in _PLAIN


def _write_plain(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, _PLAIN[kind]) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(value, kind)
    return str(value) if kind is str else value


def _read_plain(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    # `isinstance` would accept True as an int.
    if type(plain) not in _PLAIN[kind]:
        raise _unexpected(f"a value of type {getattr(kind, '__name__', kind)}", plain)
    return plain


def _write_any(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _write_any(item, kind, blobs) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_write_any(item, kind, blobs) for item in value]
    if type(value) not in (bool, int, float, str, type(None)):
        raise _wrong(value, "a JSON value")
    return value


def _read_any(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    return plain


# values that are written as text


_NAMED: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Path: (str, Path),
    torch.dtype: (lambda dtype: str(dtype).removeprefix("torch."), _DTYPES.__getitem__),
}


def _is_named(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, enum.Enum) or kind in _NAMED)


def _write_named(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, kind):
        raise _wrong(value, kind)
    return value.value if issubclass(kind, enum.Enum) else _NAMED[kind][0](value)


def _read_named(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    try:
        if issubclass(kind, enum.Enum):
            return kind(plain)
        if isinstance(plain, str):
            return _NAMED[kind][1](plain)
    except (ValueError, KeyError, TypeError):
        pass
    raise _unexpected(f"a {kind.__name__}", plain)


def _write_literal(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not _is_one_of(value, kind):
        raise _wrong(value, kind)
    return value


def _read_literal(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    if not _is_one_of(plain, kind):
        raise _unexpected(" or ".join(map(repr, typing.get_args(kind))), plain)
    return plain


def _is_one_of(value: object, kind: Any) -> bool:
    return any(type(value) is type(each) and value == each for each in typing.get_args(kind))


def _write_tensor(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, torch.Tensor):
        raise _wrong(value, kind)
    data = value.detach().cpu().contiguous()
    blobs.append(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return [_NAMED[torch.dtype][0](value.dtype), list(value.shape), len(blobs) - 1]


def _read_tensor(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    name, shape, index = _read(plain, tuple[str, tuple[int, ...], int], blobs)
    blob = blobs[index] if 0 <= index < len(blobs) else None
    dtype = _DTYPES.get(name)
    if blob is None or dtype is None:
        raise _unexpected("a tensor", plain)
    # Each tensor is used once: two values must not share memory.
    blobs[index] = None
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(blob):
        raise _unexpected(f"a tensor of {len(blob)} bytes", plain)
    try:
        if not blob:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # The bytes are copied: a tensor over the message would keep the whole message in memory.
        return torch.frombuffer(bytearray(blob), dtype=dtype).reshape(shape)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch refuses dtype or shape
        raise _unexpected("a tensor", plain) from error


_ERROR = tuple[str, str, str | None, str | None]


def _write_error(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, HeadwaterError):
        raise _wrong(value, kind)
    # A subclass that the other rank may not know is sent as its nearest known base.
    name = next(each.__name__ for each in type(value).__mro__ if error_class(each.__name__) is each)
    return _write((name, value.what, value.where, value.remedy), _ERROR, blobs)


def _read_error(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    name, what, where, remedy = _read(plain, _ERROR, blobs)
    found = error_class(name)
    if found is None:
        raise _unexpected("an error of Headwater", name)
    return found(what, where=where, remedy=remedy)


# containers


def _write_union(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    count = len(blobs)
    for index, each in enumerate(typing.get_args(kind)):
        try:
            return [index, _write(value, each, blobs)]
        except TypeError:
            # A member of the union that did not fit may have appended tensors.
            del blobs[count:]
    raise _wrong(value, kind)


def _read_union(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    members = typing.get_args(kind)
    if (
        not isinstance(plain, list)
        or len(plain) != 2
        or type(plain[0]) is not int
        or not 0 <= plain[0] < len(members)
    ):
        raise _unexpected(f"one of {len(members)} types", plain)
    return _read(plain[1], members[plain[0]], blobs)


def _kinds(kind: Any, count: int) -> list[Any] | None:
    """Return the kind of each of `count` entries; `None` if `kind` does not allow that many."""
    entries = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and not (len(entries) == 2 and entries[1] is Ellipsis):
        return list(entries) if len(entries) == count else None
    return [entries[0]] * count


def _write_sequence(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    origin = typing.get_origin(kind)
    kinds = _kinds(kind, len(value)) if isinstance(value, origin) and not isinstance(value, str) else None
    if kinds is None:
        raise _wrong(value, kind)
    return [_write(item, each, blobs) for item, each in zip(value, kinds, strict=True)]


def _read_sequence(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    kinds = _kinds(kind, len(plain)) if isinstance(plain, list) else None
    if kinds is None:
        raise _unexpected(f"{kind}", plain)
    items = [_read(item, each, blobs) for item, each in zip(plain, kinds, strict=True)]
    return tuple(items) if typing.get_origin(kind) is tuple else items


def _write_mapping(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(value, kind)
    key, item = typing.get_args(kind)
    return [[_write(k, key, blobs), _write(v, item, blobs)] for k, v in value.items()]


def _read_mapping(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    pairs = _read(plain, list[tuple[typing.get_args(kind)]], blobs)  # type: ignore[misc]
    try:
        value = dict(pairs)
    except TypeError as error:
        raise _unexpected(f"{kind}", plain) from error
    # `dict` has silently dropped all but the last of equal keys.
    if len(value) != len(pairs):
        raise _unexpected("every key once", plain)
    return value


def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _write_dataclass(value: Any, kind: Any, blobs: list[bytes]) -> Any:
    if type(value) is not kind:
        raise _wrong(value, kind)
    return {name: _write(getattr(value, name), each, blobs) for name, each in _fields(kind).items()}


def _read_dataclass(plain: Any, kind: Any, blobs: list[memoryview | None]) -> Any:
    fields = _fields(kind)
    if not isinstance(plain, dict) or plain.keys() != fields.keys():
        raise _unexpected(f"the fields of {kind.__name__}", plain)
    values = {name: _read(plain[name], each, blobs) for name, each in fields.items()}
    try:
        return kind(**values)
    except HeadwaterError as error:
        raise _unexpected(f"a valid {kind.__name__}", plain) from error


_Rule = tuple[
    Callable[[Any], bool],
    Callable[[Any, Any, list[bytes]], Any],
    Callable[[Any, Any, list[memoryview | None]], Any],
]


def _has_origin(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: typing.get_origin(kind) in origins


_RULES: list[_Rule] = [
    (_is_plain, _write_plain, _read_plain),
    (lambda kind: kind is Any, _write_any, _read_any),
    (_is_named, _write_named, _read_named),
    (_has_origin(typing.Literal), _write_literal, _read_literal),
    (_has_origin(typing.Union, types.UnionType), _write_union, _read_union),
    (_has_origin(list, tuple, Sequence), _write_sequence, _read_sequence),
    (_has_origin(dict, Mapping), _write_mapping, _read_mapping),
    (lambda kind: kind is torch.Tensor, _write_tensor, _read_tensor),
    (lambda kind: kind is HeadwaterError, _write_error, _read_error),
    (dataclasses.is_dataclass, _write_dataclass, _read_dataclass),
]
