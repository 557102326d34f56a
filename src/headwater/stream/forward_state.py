"""The state at the beginning of a forward. Backward restores it to repeat the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nested._internal import nested_tensor

from headwater.core.effects import state_of_model
from headwater.core.module_parameters import parameters_of
from headwater.core.python_state import PythonState, refuse_changed_tensors
from headwater.core.tensor_values import copies_of, may_change, put_back
from headwater.core.torch_settings import TorchSettings


class ForwardState:
    """A record of what a forward reads beside its arguments and parameters, as it is now.

    It consists of attributes, variables, lists and dictionaries, buffers, and random generators other than
    torch's default one. It also has the `requires_grad` of each parameter, and torch's settings and modes.
    Between a forward and its backward all of these may change: another forward sets attributes,
    `model.eval()` changes modes, a hook is removed, a parameter is frozen, a context around the forward ends.
    The second run must not see these changes.

    Args:
        module: the module whose forward is about to run.
        arguments: functions and modules that the forward gets as arguments.
    """

    def __init__(self, module: nn.Module, arguments: Sequence[Any] = ()) -> None:
        self._module, self._arguments = module, arguments
        self._python = state_of_model(module, arguments)
        self._settings = TorchSettings()
        self._values = copies_of(_tensors_of(module))
        self._params = list(parameters_of(module))
        self._are_trained = _are_trained(self._params)
        self._first_ragged: int = nested_tensor._tensor_id_counter

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter a context with the recorded state. The state before is restored at the end."""
        python = self._present_python()
        values = copies_of([*_tensors_of(self._module), *(tensor for tensor, _ in self._values)])
        are_trained = _are_trained(self._params)
        hooks = [set(hooks) for hooks in _hooks_of(self._params)]
        # Tensors of the module are put back, whatever their size.
        own = {tensor.untyped_storage().data_ptr() for tensor, _ in values}
        large = [
            (tensor, version)
            for tensor, version in python.versions_of_large_tensors()
            if tensor.untyped_storage().data_ptr() not in own
        ]
        try:
            if python is not self._python:
                self._python.put_back()
            put_back(self._values)
            _set_trained(self._params, self._are_trained)
            with self._settings.restored(), _ragged_sizes_from(self._first_ragged):
                yield
        finally:
            _remove_other_hooks(self._params, hooks)
            _set_trained(self._params, are_trained)
            put_back(values)
            python.put_back()
            # Changes of the second run only: between the runs the user's loop may change these too.
            python.refuse_advanced_iterators()
            refuse_changed_tensors(large)

    def _present_python(self) -> PythonState:
        if self._python.is_present():
            return self._python
        python = state_of_model(self._module, self._arguments)
        python.add_places_of(self._python)
        return python


@contextmanager
def _ragged_sizes_from(first: int) -> Iterator[None]:
    """Enter a context in which new jagged tensors get the symbols of ragged sizes from number `first` on.

    The gradients that come from later layers have the symbols of the first run, and torch compares them with
    those of the second run.
    """
    present = nested_tensor._tensor_id_counter
    nested_tensor._tensor_id_counter = first
    try:
        yield
    finally:
        nested_tensor._tensor_id_counter = max(present, nested_tensor._tensor_id_counter)


def _are_trained(params: Sequence[nn.Parameter]) -> list[bool]:
    with torch._C.DisableTorchFunctionSubclass():  # faster, because the parameters may be at rest
        return [param.requires_grad for param in params]


def _set_trained(params: Sequence[nn.Parameter], are_trained: Sequence[bool]) -> None:
    """Set `requires_grad` of parameters where it has changed: autograd saves other tensors without it."""
    for param, before, trained in zip(params, _are_trained(params), are_trained, strict=True):
        if before != trained:
            param.requires_grad_(trained)


def _hooks_of(params: Sequence[nn.Parameter]) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks on the gradients of parameters; new ones for parameters without."""
    with torch._C.DisableTorchFunctionSubclass():  # as above
        kinds = [(param._backward_hooks, param._post_accumulate_grad_hooks) for param in params]
    return [{} if hooks is None else hooks for pair in kinds for hooks in pair]


def _remove_other_hooks(params: Sequence[nn.Parameter], kept: list[set[int]]) -> None:
    """Remove the hooks that a second run has added: the first run has added them for this backward."""
    for hooks, identities in zip(_hooks_of(params), kept, strict=True):
        for added in hooks.keys() - identities:
            del hooks[added]


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a module that a forward may change in place: buffers and attributes."""
    return [
        tensor
        for part in module.modules()
        for tensor in (*part._buffers.values(), *vars(part).values())
        if isinstance(tensor, torch.Tensor) and may_change(tensor)
    ]
