"""Checkpoints that Cerebras' software writes: HDF5 files, usually with the ending `.mdl`.

Source of the format: the packages cerebras_pytorch and cerebras_appliance 2.10.0 (BSD-3-Clause). There are
two layouts. In both, each tensor is a data set, and the name of a value consists of its keys in the state,
joined by points.

| format | other values | structure |
|---|---|---|
| 0.1 to 0.4 | data sets, with their kind in the attribute `__H5_TYPE__` | a pickle, which is not read |
| 0.5 | as JSON in the attribute `NAME.__metadata__` of the file | as JSON in the attribute `__spec__` |
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from urllib.parse import unquote

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError
from headwater.core.file_tensor import FileTensor
from headwater.core.packages import importing

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_NEWEST = 0.5
_METADATA = ".__metadata__"
_BITS = {torch.bfloat16: (torch.int16, torch.uint16)}
"""The dtypes in the file of a dtype that HDF5 lacks."""


def is_mdl(path: Path) -> bool:
    """True if `path` is an HDF5 file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False


@final
class _Source:
    """A file that stays open as long as a tensor may be read from it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


@dataclasses.dataclass(frozen=True)
class Mdl:
    """The content of a checkpoint of Cerebras' software.

    Attributes:
        values: the values by name: tensors, numbers, strings, bools and `None`. A value with several names is
            under each of them.
        unread: names of the other values: pickled objects, which could run any code, and tensors in another
            file.
        structure: the nesting of the state, with names instead of values; `None` in formats before 0.5.
    """

    values: Mapping[str, FileTensor | str | float | bool | None]
    unread: Sequence[str]
    structure: Any

    @property
    def tensors(self) -> dict[str, FileTensor]:
        """The tensors by name."""
        return {name: each for name, each in self.values.items() if isinstance(each, FileTensor)}

    def nested(self, values: Mapping[str, Any]) -> Any:
        """Return values, given by name, in the nesting of the saved state.

        Names that `values` lacks are left out. In formats before 0.5 the nesting is not known. There the
        result is a dict by the first key in the names, of dicts by the rest of the name.
        """
        if self.structure is not None:
            return _with_values(self.structure, values)
        state: dict[str, Any] = {}
        for name, value in values.items():
            first, point, rest = name.partition(".")
            if point:
                state.setdefault(first, {})[rest] = value
            else:
                state[first] = value
        return state


def read_mdl(path: Path) -> Mdl:
    """Read the names and the values of a checkpoint, but not the values of its tensors.

    Raises:
        ConfigError: if a package that reads these files is not installed.
        CheckpointError: if the file is damaged, incomplete, of a newer format, or another kind of HDF5 file.
    """
    try:
        # Tensors are read later from this file, even if another file has got its name by then.
        source = _Source(path)
    except OSError as error:
        raise CheckpointError(
            f"the file cannot be opened: {error.strerror}", where=str(path), remedy="check the path"
        ) from error
    with _opened(source) as file:
        attributes = dict(file.attrs)
        version = float(attributes.get("__version__", 0.1))
        if "__spec__" not in attributes:
            raise CheckpointError(
                "this HDF5 file is not a checkpoint of Cerebras' software: it has no attribute __spec__",
                where=str(path),
                remedy="name a file that cstorch.save has written",
            )
        if version > _NEWEST:
            raise CheckpointError(
                f"expected a format up to {_NEWEST}, found format {version}",
                where=str(path),
                remedy="convert it to Hugging Face's format with the Model Zoo",
            )
        return _old_layout(source, file) if version < _NEWEST else _new_layout(source, file, attributes)


@contextmanager
def _opened(source: _Source) -> Iterator[Any]:
    """Open an HDF5 file, and turn the errors that a damaged one causes into a `CheckpointError`."""
    with importing(f"reading {source.path}", "mdl"):
        import h5py
        import hdf5plugin  # noqa: F401  # registers LZ4, in which tensors are compressed
    try:
        # HDF5 itself cannot open a file that was removed, so it reads through a file of Python.
        with Path(f"/proc/self/fd/{source.descriptor}").open("rb") as opened, h5py.File(opened, "r") as file:
            yield file
    except _DAMAGED as error:
        raise CheckpointError(
            f"the file cannot be read: {type(error).__name__}: {error}",
            where=str(source.path),
            remedy="copy it again",
        ) from error


_DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""Errors that h5py raises for a damaged file, and that follow from wrong values in it."""


# format 0.5


def _new_layout(source: _Source, file: Any, attributes: Mapping[str, Any]) -> Mdl:
    if not attributes.get("__SUCCESS__", False):
        raise CheckpointError(
            "the file is incomplete: its writer was interrupted",
            where=str(source.path),
            remedy="use another checkpoint",
        )
    values: dict[str, Any] = {}
    unread, links = [], {}
    for attribute, text in attributes.items():
        if not attribute.endswith(_METADATA):
            continue
        name = attribute.removesuffix(_METADATA)
        found = json.loads(text).get(attribute, {})
        kind = found.get("__TYPE__")
        if found.get("__LINKED__"):
            links[name] = found["key"]
        elif kind in _PLAIN:
            values[name] = found.get(_PLAIN[kind])
        elif kind == "DeferredFullTensor":
            dtype = _dtype(found["dtype"])
            values[name] = _filled(name, tuple(found["shape"]), dtype, found["fill_value"])
        elif found.get("__NUMPY__"):
            dtype = _dtype(found["dtypes"][0]) if "dtypes" in found else _dtype_of(file[name], found)
            values[name] = _stored(source, name, file[name], dtype)
        else:
            unread.append(name)
    _, root = json.loads(json.loads(attributes["__spec__"])[1])
    return Mdl(*_linked(values, unread, links), _nested(root, ()))


_PLAIN = {"ScalarSerializer": "scalar_value", "StringSerializer": "string_value", "NoneSerializer": ""}
"""The key of a plain value in its metadata, by the kind of the value."""


def _nested(node: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the nesting that a node of `__spec__` describes, with the name of each value in its place.

    Args:
        node: kind, context and children, as torch writes the structure of nested values.
        keys: the keys of the node.
    """
    kind, children = node["type"], node["children_spec"]
    if kind is None:
        return ".".join(keys)
    if kind in ("builtins.dict", "collections.OrderedDict"):
        names = json.loads(node["context"])
        return {name: _nested(child, (*keys, str(name))) for name, child in zip(names, children, strict=True)}
    # All others are sequences.
    found = [_nested(child, (*keys, str(index))) for index, child in enumerate(children)]
    return tuple(found) if kind == "builtins.tuple" else found


def _with_values(structure: Any, values: Mapping[str, Any]) -> Any:
    """Return a nesting of names with the value of each name in its place, if there is one."""
    if isinstance(structure, dict):
        return {
            key: _with_values(each, values)
            for key, each in structure.items()
            if not isinstance(each, str) or each in values
        }
    if isinstance(structure, list | tuple):
        return type(structure)(
            _with_values(each, values) for each in structure if not isinstance(each, str) or each in values
        )
    return values[structure]


# formats 0.1 to 0.4


def _old_layout(source: _Source, file: Any) -> Mdl:
    values: dict[str, Any] = {}
    unread, links = [], {}
    for key in file:
        name, data = unquote(key), file[key]
        found = dict(data.attrs)
        kind = found.get("__H5_TYPE__") or _older_kind(found)
        if kind in ("TorchTensorH5Type", "NumpyArrayH5Type"):
            values[name] = _stored(source, name, data, _dtype_of(data, found))
        elif kind in ("DeferredH5Tensor", "StoredTensorH5Type") and found.get("link_to_self"):
            links[name] = unquote(found["key"])
        elif kind in ("DeferredFullTensor", "FullTensorH5Type"):
            shape = tuple(int(size) for size in found["shape"])
            values[name] = _filled(name, shape, _dtype_of(data, found), found["fill_value"].item())
        elif kind == "ScalarH5Type":
            values[name] = data[...].item()
        elif kind == "StringH5Type":
            values[name] = str(found.get("string_value", found.get("string_val")))
        elif kind == "NoneH5Type":
            values[name] = None
        else:
            unread.append(name)
    return Mdl(*_linked(values, unread, links), None)


def _older_kind(found: Mapping[str, Any]) -> str:
    """Return the kind of a data set from the attributes that releases up to 1.8 have written."""
    marks = {
        "filepath": "",
        "is_constructible": "DeferredFullTensor",
        "is_none": "NoneH5Type",
        "is_string": "StringH5Type",
        "is_scalar": "ScalarH5Type",
    }
    return next((kind for mark, kind in marks.items() if found.get(mark)), "TorchTensorH5Type")


# both


def _linked(
    values: Mapping[str, Any], unread: Sequence[str], links: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values, and the names of unread ones. Names that are links to others get their values."""
    found = {name: values[other] for name, other in links.items() if other in values}
    return {**values, **found}, [*unread, *(name for name in links if name not in found)]


def _stored(source: _Source, name: str, data: Any, dtype: torch.dtype) -> FileTensor:
    return FileTensor(name, data.shape, dtype, functools.partial(_read, source, data.name, dtype))


def _filled(name: str, shape: tuple[int, ...], dtype: torch.dtype, value: float | None) -> FileTensor:
    """Return a tensor whose elements are all equal. The file holds one of them."""
    fill = value or 0
    torch.full(shape, fill, dtype=dtype, device="meta")  # raises now if a value is damaged
    return FileTensor(name, shape, dtype, lambda: torch.full(shape, fill, dtype=dtype, device="cpu"))


def _read(source: _Source, key: str, dtype: torch.dtype) -> Tensor:
    with _opened(source) as file:
        values = torch.from_numpy(file[key][...])
    return values.view(dtype) if values.dtype in _BITS.get(dtype, ()) else values.to(dtype)


def _dtype_of(data: Any, found: Mapping[str, Any]) -> torch.dtype:
    if found.get("is_bfloat16"):
        return torch.bfloat16
    return _dtype(f"torch.{data.dtype}")


def _dtype(name: str) -> torch.dtype:
    """Return a dtype by its name in torch, such as `torch.bfloat16`."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return found
