"""Warnings of tensors that shared memory with a parameter, and do not follow its changes any more.

In plain PyTorch `weight.detach()` shares the memory of the weight. Streaming moves the weight to the store,
so a tensor that was made from it before keeps the values of that moment. A view that a forward makes of a
weight uses the memory of a slab or of the store. If the program keeps the view, later optimizer steps do not
change it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import nn

from headwater.core.units import listed
from headwater.plan.alive import has_storage
from headwater.stream.assigned_sources import changed_sources
from headwater.stream.parameters import ParameterAtRest

_SHOWN = 3
"""Maximum number of parameter names in one warning."""


_OWN_REFERENCES = 2
"""References to a parameter that torch counts: the Python object, and the node that gets the gradient."""

_STORAGE_OBJECT = 1
"""References to a storage that its Python object has."""

_SEARCH_REFERENCES = 3
"""References to a tensor that Python counts in `_held`: a list, a variable, and the call that counts."""


class StaleTensorWarning(UserWarning):
    """Warns of a tensor that shared memory with a parameter. It keeps the old values from now on."""


def warn_of_references(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Warn of tensors that share memory with parameters which are about to be streamed.

    Args:
        params: names and parameters that still have their values in memory.
    """
    params = list(params)
    known = {id(param) for _, param in params}
    names = {address: name for name, param in params if (address := _address(param)) is not None}
    # In a large program a search is slow, and garbage collection too, so they run only if necessary.
    if not _may_be_shared(param for _, param in params) or not _shared(names, known):
        return
    gc.collect()  # unreachable tensors need no warning
    found = _shared(names, known)
    if found:
        shown = listed([name for name in names.values() if name in found], _SHOWN)
        warnings.warn(
            f"a tensor that was made from {shown} before the first forward with it keeps "
            "its present values, because streaming moves the weights; make it after that forward "
            "(parameter.detach()), or clone() it if it is to keep the values",
            StaleTensorWarning,
            stacklevel=2,
        )


def warn_of_kept_views(params: Iterable[ParameterAtRest], number: int) -> None:
    """Warn of views of parameters that a forward made and that still exist after an optimizer's update.

    Args:
        params: the parameters that the optimizer has updated.
        number: the number of the step, from 1. Only the steps 1, 2, 4, 8, 16, … are checked.
    """
    if number.bit_count() > 1:
        return
    names = {id(param): param.home.spec.name for param in params if _is_referred_to(param)}
    # The search for views is slow, so it runs only if something, such as a view, refers to a parameter.
    if not names or not _viewed(names):
        return
    gc.collect()
    found = _viewed(names)
    if found:
        shown = listed([name for name in names.values() if name in found], _SHOWN)
        warnings.warn(
            f"a view of {shown} that was made in a forward exists at "
            "optimizer.step() and keeps the values from before the step, because the weight is streamed; "
            "make it again after the step, or clone() it if it is to keep the values",
            StaleTensorWarning,
            stacklevel=2,
        )


def warn_of_changed_sources() -> None:
    """Warn of tensors that were assigned to the `data` of a streamed parameter, and have changed since."""
    changed = [param for param in changed_sources() if isinstance(param, ParameterAtRest)]
    if changed:
        shown = listed([param.home.spec.name for param in changed], _SHOWN)
        warnings.warn(
            f"a tensor that was assigned to the data of {shown} has changed since then, but the parameter "
            "keeps the assigned values, because the store has a copy of them; change parameter.data "
            "instead, or assign the tensor again",
            StaleTensorWarning,
            stacklevel=2,
        )


def _is_referred_to(param: ParameterAtRest) -> bool:
    """True if something refers to the parameter besides its Python object and its gradient node."""
    with torch._C.DisableTorchFunctionSubclass():
        if not param.requires_grad:
            return False
        node = torch.autograd.graph.get_gradient_edge(param).node  # it exists now, and counts as a reference
        is_referred_to: bool = torch.Tensor._use_count(param) > _OWN_REFERENCES  # type: ignore[attr-defined]
        del node
    return is_referred_to


def _may_be_shared(params: Iterable[nn.Parameter]) -> bool:
    """False if no other tensor can have the memory of one of these parameters."""
    storages = [param.untyped_storage() for param in params if _address(param) is not None]
    users = Counter(storage._cdata for storage in storages)
    return any(
        # torch's own memory belongs to one storage. Others may be made of an array or of a file.
        not storage.resizable()
        or torch._C._storage_Use_Count(storage._cdata) > users[storage._cdata] + _STORAGE_OBJECT
        for storage in storages
    )


def _viewed(names: Mapping[int, str]) -> set[str]:
    """Return the names of parameters that have a view. A detached tensor is not such a view.

    Args:
        names: identity of a parameter -> its name.
    """
    views = _held(lambda tensor: tensor._is_view() and id(tensor._base) in names)
    return {names[id(view._base)] for view in views}


def _shared(names: Mapping[int, str], known: Collection[int]) -> set[str]:
    """Return the names of the parameters that share their address with another tensor.

    Args:
        names: address -> name of the parameter.
        known: identities of the parameters.
    """
    outside = _held(lambda tensor: id(tensor) not in known and _address(tensor) in names)
    return {names[address] for tensor in outside if (address := _address(tensor)) is not None}


def _held(is_meant: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Return each `torch.Tensor` and `nn.Parameter` that the program can reach, and that `is_meant` accepts.

    Objects of subclasses are left out, and so are tensors that only an autograd graph holds. Such a tensor
    has a Python object if a kernel or a mode in Python has seen it, and then torch refers to that object.
    """
    found = [
        each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and is_meant(each)
    ]
    return [each for each in found if sys.getrefcount(each) - _is_held_by_torch(each) > _SEARCH_REFERENCES]


def _is_held_by_torch(tensor: torch.Tensor) -> bool:
    """True if torch refers to the Python object, because C++ code such as a graph holds the tensor too."""
    is_held: bool = torch.Tensor._use_count(tensor) > 1  # type: ignore[attr-defined]
    return is_held


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory; `None` for a tensor without memory."""
    if not has_storage(tensor) or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage().data_ptr() or None
