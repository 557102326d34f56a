"""The place of a parameter in the weight store: reads and writes its values and its gradient."""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import nn

from headwater.core.interrupts import uninterrupted
from headwater.core.modes import apart_from_modes
from headwater.core.stage import ParamKey, ParamSpec, dense_strides

if TYPE_CHECKING:
    from headwater.store.store import WeightStore

MakePlain = Callable[[ParamKey, torch.device], None]
"""Function that turns a parameter into a plain one, whose values it copies to a device."""


@dataclasses.dataclass(frozen=True)
class ValuesVersion:
    """The values of a parameter at one time. It compares unequal once they may have changed.

    Attributes:
        store: the weight store. The reference is weak, so that a version may outlive a dropped model.
        key: the parameter.
        count: the store's counter of changes to the stage.
    """

    store: weakref.ref[WeightStore]
    key: ParamKey
    count: int

    @property
    def is_present(self) -> bool:
        """True if the parameter still has these values."""
        store = self.store()
        return store is not None and store.version(self.key[0]) == self.count


@dataclasses.dataclass(frozen=True)
class Home:
    """The place of a parameter's values and gradient in a weight store.

    Attributes:
        store: the weight store.
        stage: the parameter's stage.
        index: the parameter's index in the stage.
        kind: the class of the parameter while it is bound, or not streamed.
        device: the device of values that are read.
        make_plain: returns the function that turns the parameter into a plain one; returns `None` after the
            engine has left the model.
    """

    store: WeightStore
    stage: int
    index: int
    kind: type[nn.Parameter]
    device: torch.device
    make_plain: Callable[[], MakePlain | None] = dataclasses.field(compare=False, repr=False)

    @property
    def key(self) -> ParamKey:
        return self.stage, self.index

    @property
    def spec(self) -> ParamSpec:
        return self.store.stages[self.stage].params[self.index]

    @property
    def meta(self) -> torch.Tensor:
        """A tensor with the parameter's shape, strides and dtype on the meta device."""
        spec = self.spec
        with torch.inference_mode(False):
            return spec.like_the_parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    @property
    def version(self) -> ValuesVersion:
        """The version of the present values."""
        return ValuesVersion(weakref.ref(self.store), self.key, self.store.version(self.stage))

    @uninterrupted
    def read(self) -> torch.Tensor:
        """Return a copy of the master on `device`, a normal tensor in any mode and any transform."""
        with apart_from_modes():
            return self.read_on_host().to(self.device)

    @uninterrupted
    def read_on_host(self) -> torch.Tensor:
        """Return a copy of the master in host memory."""
        return self.store.parameters.read_param(self.key)

    def put_copy_in_file(self, memory: mmap.mmap) -> bool:
        """Put reserved memory for a copy of the values into a file; return False to keep it in memory."""
        return self.store.parameters.put_copy_in_file(memory)

    def plain_copy(self, *, requires_grad: bool) -> nn.Parameter:
        """Return a new plain parameter with the present values. As in torch's copies, it has no gradient."""
        return self.kind(self.read(), requires_grad)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the master piece by piece. A piece is valid until the next is yielded."""
        with closing(self.store.parameters.read(self.stage, states=(), params={self.index})) as pieces:
            for piece in pieces:
                yield piece.master

    def fits(self, value: torch.Tensor) -> bool:
        """True if the store can keep `value`: it has the parameter's shape, dtype and strides."""
        spec = self.spec
        alike = tuple(value.shape) == spec.shape and dense_strides(value) == spec.strides
        return alike and value.dtype == spec.dtype

    @uninterrupted
    def leave(self, device: torch.device) -> None:
        """Turn the parameter into a plain parameter, with its values copied from the store to a device."""
        make_plain = self.make_plain()
        assert make_plain is not None, "a parameter at rest has an engine"
        make_plain(self.key, device)

    def write(self, value: torch.Tensor) -> None:
        """Replace the master by a tensor of its shape."""
        self.store.parameters.write_param(self.key, value.detach())

    @property
    def gradient_is_consumed(self) -> bool:
        """True if a step has consumed the gradient, and the gradient was not dropped since then."""
        return self.key in self.store.gradients.status.consumed

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient that no optimizer has consumed yet, or `None`."""
        return self.store.borrow_gradient(self.key)

    def zero_gradient(self) -> None:
        """Set the gradient to zeros. A sparse gradient is replaced by a sparse tensor that has no entries."""
        spec = self.spec
        # A norm adds in the order of memory, so other strides would change its last bits.
        zeros = spec.like_the_parameter(torch.zeros(spec.shape, dtype=spec.gradient_dtype, device="cpu"))
        if self.key in self.store.gradients.status.sparse:
            zeros = zeros.to_sparse(1)
        # A loop may keep the tensors of its gradients, and use them again in each step.
        mine = self.store.gradients.loop_tensor(self.key, zeros)
        self.set_gradient(zeros if mine is None or mine.requires_grad else mine.zero_())

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Replace the gradient, or drop it if `gradient` is `None`."""
        if gradient is None:
            self.store.drop_gradient(self.key)
        else:
            self.store.set_gradient(self.key, gradient)
