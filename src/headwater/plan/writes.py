"""Tensors that a forward changes: parameters, as a dry run sees them, and those that backward needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headwater.core.errors import StreamError
from headwater.core.operators import argument_values, written_arguments
from headwater.core.trees import operands
from headwater.plan.alive import has_storage

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_OF_GRADIENTS = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)
_CONVERSION = torch.nn.Module._apply.__code__
"""The code of `module.to()` and similar methods, which convert the gradients that a module has."""


_UPDATES_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    )
)
"""Operators that change running statistics in place, although their schemas do not say so."""


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator changes in place."""
    changed = written_arguments(func)
    if func._schema.name in _UPDATES_STATISTICS:
        changed = "running_mean", "running_var"
    return operands(argument_values(changed, func, args, kwargs))


class ParameterWrites(TorchFunctionMode):
    """Records which parameters a forward writes in place, and to which it assigns `param.data = ...`.

    It refuses forwards that read or set gradients of parameters: these are in the store during a forward.

    Attributes:
        units: the stages whose modules run while a parameter is written, and, if the caller adds them, those
            with an input that is changed in place. They cannot run a second time.

    Args:
        params: the parameters of the dry run by name.
        running: the stages whose modules run now; the caller changes the list.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], running: list[int]) -> None:
        super().__init__()
        self._params = dict(params)
        self._running = running
        self._by_identity = {id(param): name for name, param in params.items()}
        # The storages are kept alive, so that no new storage gets the address of an old one.
        self._storages = {name: param.untyped_storage() for name, param in params.items()}
        self._names = {int(storage._cdata): name for name, storage in self._storages.items()}
        self._in_place: set[str] = set()
        self._saved: set[str] = set()
        self.units: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch runs no operator for this assignment, so a dispatch mode does not see it.
        if func == _DATA.__set__:
            self.units.update(self._running)
        if self._running and func in _OF_GRADIENTS and sys._getframe(1).f_code is not _CONVERSION:
            self._refuse_gradient_of(args[0])
        return func(*args, **(kwargs or {}))

    def _refuse_gradient_of(self, tensor: torch.Tensor) -> None:
        """Raise if the forward reads or sets the gradient of a parameter.

        Raises:
            StreamError: if `tensor` is a parameter.
        """
        name = self._by_identity.get(id(tensor))
        if name is not None:
            raise StreamError(
                f"the forward reads or sets {name}.grad, but the weight store has the gradients meanwhile",
                where=name,
                remedy="use the gradient between forwards, and pass values of it to the model as an argument",
            )

    def note_operator(self, changed: Iterable[torch.Tensor]) -> None:
        """Record that an operator of the forward has changed these tensors in place."""
        for tensor in changed:
            name = self._name(tensor)
            if name is not None:
                self._in_place.add(name)
                self.units.update(self._running)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Record that autograd has saved this tensor."""
        name = self._name(tensor)
        if name is not None:
            self._saved.add(name)

    def _name(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(int(tensor.untyped_storage()._cdata)) if has_storage(tensor) else None

    @property
    def _assigned(self) -> set[str]:
        """The parameters whose storage the forward has replaced by `param.data = ...`."""
        return {
            name
            for name, param in self._params.items()
            if param.untyped_storage()._cdata != self._storages[name]._cdata
        }

    @property
    def written(self) -> tuple[str, ...]:
        """The parameters whose values the forward has changed."""
        return tuple(sorted(self._in_place | self._assigned))

    @property
    def assigned_after_use(self) -> tuple[str, ...]:
        """The parameters whose storage was replaced after autograd had saved the old one for backward."""
        return tuple(sorted(self._assigned & self._saved))


def changed_in_place(shape: Sequence[int]) -> StreamError:
    """Return the error for a tensor of this shape that was changed in place after autograd saved it."""
    return StreamError(
        f"a tensor of shape {list(shape)} that backward needs was changed in place",
        remedy="use the operator that returns a new tensor, as in plain PyTorch",
    )


def refuse_assignments_after_use(names: Sequence[str]) -> None:
    """Raise if a forward replaced the storage of a parameter while backward still needs the old one.

    Args:
        names: these parameters; see `ParameterWrites.assigned_after_use`.

    Raises:
        StreamError: if `names` is not empty.
    """
    if names:
        raise StreamError(
            f"the forward computes with {names[0]} and assigns {names[0]}.data afterwards",
            where="backward, which needs the old values",
            remedy="assign it before its use, or between steps",
        )
