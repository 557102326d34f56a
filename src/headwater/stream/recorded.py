"""Copies of weights that autograd has read outside of a forward, and that follow the weights.

[Note: recorded views]
A tensor at rest cannot be a node of a graph. So `weight[0]` with gradients is a view of a copy of the weight,
and the copy's gradient goes to the weight. In plain PyTorch the view shares the memory of the weight: it
follows a step, and a write to it changes the weight. So such views are `RecordedPart` tensors. Before each
operation on one of them the copy gets the present values, if these have changed. This counts as a change in
place, as the step does in plain PyTorch. Changes of the copy are written to the weight.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.stream.parameter_memory import KeptHome


@final
class RecordedRead:
    """The values of a tensor at rest that autograd has read. All views of them refer to this object.

    Attributes:
        memory: the memory to which the tensor at rest points; see `AtRest.source`.

    Args:
        leaf: the tensor at rest.
        values: its values, in new memory.
    """

    def __init__(self, leaf: Any, values: torch.Tensor) -> None:
        self.memory, self._owner, self._selection = leaf.source, leaf.owner, leaf.selection
        self._values = values.detach()  # shares the version counter of the views
        self._state = self._present_state()

    @property
    def home(self) -> Any:
        """The place of the values now."""
        return self.memory.home

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight had in the store at the read."""
        return self._values.dtype

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is a view of the values."""
        address = self._values.untyped_storage().data_ptr()
        return address != 0 and tensor.untyped_storage().data_ptr() == address

    def _present_state(self) -> object:
        """Return a key that changes with the values; `None` if changes are not counted."""
        home = self.home
        if isinstance(home, KeptHome):
            return None
        return home.version, self.memory.param._version

    @uninterrupted
    def refresh(self) -> None:
        """Copy the values again if they have changed."""
        state = self._present_state()
        if state is not None and state == self._state:
            return
        with _disable_current_modes():  # in a dry run the values would not be copied
            values = self._selection(self.home.read()).to(self._values.dtype)
            if not torch.equal(values, self._values):
                self._values.copy_(values)
        self._state = self._present_state()

    def forget(self) -> None:
        """Make the next `refresh` copy the values, because a refused operation has changed the copy."""
        self._state = None

    @uninterrupted
    def write(self) -> None:
        """Write the copy, which an operation has changed, to the weight.

        Raises:
            StreamError: if the weight is streamed in another dtype than its master.
        """
        home = self.home
        whole = home.read()
        if whole.dtype != self._values.dtype:
            self.forget()
            raise StreamError(
                f"a view of {self._values.dtype} was changed, but the weight is stored in {whole.dtype}",
                where=home.spec.name,
                remedy="take the view inside torch.no_grad(): it then has the dtype of the stored weight",
            )
        self._selection(whole).copy_(self._values)
        home.write(whole)
        if self._owner is not None:
            torch.autograd.graph.increment_version(self._owner)
        self._state = self._present_state()
