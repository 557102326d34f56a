"""The structure of a training state as JSON: plain values, and references to tensors by name."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.errors import CheckpointError
from headwater.core.lazy import StoredTensor
from headwater.core.safetensors import can_hold

KeyPath = tuple[object, ...]
"""The keys and indices that lead to a value in a nested state."""


def encode(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into a JSON structure and its tensors by name; the inverse of `decode`.

    Returns:
        The structure, and the tensors by name. In the structure, plain values are unchanged, and any other
        value is a dict whose only key is the kind of the value. A tensor's name consists of the keys that
        lead to it. Tensors that are the same memory have one entry.

    Raises:
        CheckpointError: if the state has a value that a file cannot hold.
    """
    encoder = _Encoder()
    return encoder.encode(state, ()), encoder.tensors


def decode(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from which `encode` made this structure and these tensors.

    Raises:
        KeyError, TypeError, ValueError: if `encode` cannot have made `structure`.
    """
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list":
            return [decode(item, tensors) for item in content]
        case "tuple":
            return tuple(decode(item, tensors) for item in content)
        case "dict":
            return {decode(key, tensors): decode(value, tensors) for key, value in content}
        case "counter":
            return Counter(decode(content, tensors))
        case "module":
            entries, metadata = (decode(part, tensors) for part in content)
            state_dict = OrderedDict(entries)
            state_dict._metadata = metadata  # type: ignore[attr-defined]
            return state_dict
        case _:
            raise ValueError(f"no kind of value is called {kind!r}")


class _Encoder:
    """An encoder for one state.

    Attributes:
        tensors: the tensors found so far, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[object, str] = {}

    def encode(self, value: Any, path: KeyPath) -> Any:
        match value:
            # JSON keeps the exact values, because it writes all digits of a float.
            case None | bool() | int() | float() | str():
                return value
            case Tensor():
                return {"tensor": self._name(value, path)}
            case list():
                return {"list": [self.encode(item, (*path, index)) for index, item in enumerate(value)]}
            case tuple():
                return {"tuple": [self.encode(item, (*path, index)) for index, item in enumerate(value)]}
            # The next two cases come before `Mapping`, because these classes are mappings too.
            case Counter():  # in the state of torch's MultiStepLR
                return {"counter": self._entries(value, path)}
            case OrderedDict() if hasattr(value, "_metadata"):  # `state_dict` of a module
                return {"module": [self._entries(value, path), self.encode(value._metadata, path)]}
            case Mapping():
                return self._entries(value, path)
        raise _refusal(
            path,
            f"is a {type(value).__module__}.{type(value).__qualname__}",
            "save dicts, lists and tuples of tensors, numbers, strings, bools and None, as in a state_dict()",
        )

    def _entries(self, mapping: Mapping[Any, Any], path: KeyPath) -> Any:
        entries = ((key, value, (*path, key)) for key, value in mapping.items())
        return {"dict": [[self.encode(key, at), self.encode(value, at)] for key, value, at in entries]}

    def _name(self, tensor: Tensor, path: KeyPath) -> str:
        identity = _identity(tensor)
        if identity not in self._names:
            self._names[identity] = name = self._free_name(path)
            self.tensors[name] = _checked(tensor, path)
        return self._names[identity]

    def _free_name(self, path: KeyPath) -> str:
        name = "/".join(map(str, path)) or "tensor"
        while name in self.tensors or name == "__metadata__":  # the format's own name
            name += "'"
        return name


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for tensors of the same memory, or with the same lazily read values."""
    if isinstance(tensor, StoredTensor):
        return tensor.read_pieces
    # All tensors without elements have the address 0.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _checked(tensor: Tensor, path: KeyPath) -> Tensor:
    if tensor.is_meta:
        raise _refusal(path, "is on the meta device: it has no values", "give it values first")
    if not can_hold(tensor):
        kind = f"is a tensor of {tensor.layout} and {tensor.dtype}"
        raise _refusal(path, kind, "save it as a dense tensor of a common dtype")
    return tensor


def _refusal(path: KeyPath, what: str, remedy: str) -> CheckpointError:
    place = "state" + "".join(f"[{key!r}]" for key in path)
    return CheckpointError(f"{place} {what}, which a checkpoint cannot hold", where=place, remedy=remedy)
