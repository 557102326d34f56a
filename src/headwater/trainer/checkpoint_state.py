"""The state of a run as files of a checkpoint: a JSON tree, and its tensors. Nothing here reads a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch

from headwater.core.checked_files import OTHER_COPY
from headwater.core.errors import CorruptError, DataError
from headwater.core.files import why_unreadable
from headwater.core.safetensors import can_hold

STATE_FILE = "trainer.json"
STATE_TENSORS_FILE = "trainer.safetensors"

_TENSOR_KEY = "__tensor__"


def pack_state(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a state, by name.

    Args:
        state: JSON values and tensors, nested in dictionaries and lists.

    Raises:
        DataError: if the state holds anything else, which only the state of a user's data loader can.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_split(state, "state", tensors), indent=1).encode()
    return {STATE_FILE: tree, STATE_TENSORS_FILE: safetensors.torch.save(tensors)}


def _split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` with its tensors replaced by their names, and move the tensors to `tensors`."""
    match value:
        case torch.Tensor():
            if not can_hold(value):
                kind = f"a tensor of {value.layout} and {value.dtype}"
                raise _unsaveable("dense tensors of common dtypes", kind, name)
            # safetensors refuses tensors that share memory or are not contiguous.
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {_TENSOR_KEY: name}
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise _unsaveable("keys that are strings", f"the key {key!r}", name)
            return {key: _split(entry, f"{name}/{key}", tensors) for key, entry in value.items()}
        case list():
            return [_split(entry, f"{name}/{index}", tensors) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _unsaveable("JSON values and tensors", f"a {type(value).__name__}", name)


def _unsaveable(expected: str, found: str, name: str) -> DataError:
    return DataError(
        f"expected the state of the run to have {expected}, found {found}",
        where=name,
        remedy="let state_dict() of the data loader return tensors, numbers, strings, lists and dictionaries "
        "with strings as keys",
    )


def unpack_state(tree: bytes, tensors: bytes, *, where: str) -> dict[str, Any]:
    """Return the state that `pack_state` wrote as two files.

    Args:
        tree: content of `STATE_FILE`.
        tensors: content of `STATE_TENSORS_FILE`.
        where: path of `STATE_FILE`, for errors.

    Raises:
        CorruptError: if a file is damaged, or does not hold a state.
    """
    try:
        by_name = safetensors.torch.load(tensors)

        def join(entry: dict[str, Any]) -> Any:
            return by_name[entry[_TENSOR_KEY]] if _TENSOR_KEY in entry else entry

        state = json.loads(tree, object_hook=join)
    except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        what = f"the state of the run cannot be read: {why_unreadable(error)}"
        raise CorruptError(what, where=where, remedy=OTHER_COPY) from error
    if not isinstance(state, dict):
        what = f"expected the state of the run to be a mapping, found a {type(state).__name__}"
        raise CorruptError(what, where=where, remedy=OTHER_COPY)
    return state
