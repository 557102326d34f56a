"""Which weights a forward under autocast reads only through a cast to 16 bits.

[Note: weights in fp32 under autocast]
Autocast casts fp32 weights to 16 bits where a matrix product or a convolution reads them. All other operators
read them in fp32: an embedding, a product with a scale, a part of the forward that has left autocast. If each
read of a weight is such a cast, the store can cast it once and send 16 bits, and all results have the bits of
plain PyTorch. Any other weight must be sent in fp32. A dry run with fp32 weights tells them apart: below
autocast, a cast is the operator `_to_copy`. A weight that is asked for its dtype is sent in fp32 too, since
the answer may decide what is computed, as in `nn.MultiheadAttention`.

The gradient of a cast weight is in 16 bits, and the backward of the cast converts it to fp32. Autocast casts
a weight once in a forward, so gradients of several operators that read this copy are added in 16 bits first.
Other forwards may read the same copy; see [Note: one cast in an autocast block]. A view of a weight, such as
`weight.t()`, is cast by each operator that reads it, and their gradients are added in fp32.
On processors with products in bf16, an LSTM computes the gradients of its copies in fp32, and autograd rounds
them to 16 bits. So the gradients of its weights are treated in the same way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headwater.core.loss_function import LossFunction
from headwater.core.module_parameters import named_parameters_of
from headwater.core.stage import ParamSpec
from headwater.core.tensor_values import OF_DTYPE
from headwater.core.trees import operands
from headwater.plan.alive import memory_key
from headwater.plan.partition import Partition

if TYPE_CHECKING:
    from headwater.plan.trace_recorder import OperatorCall

_CAST = torch.ops.aten._to_copy.default

_ASKS = frozenset({
    *OF_DTYPE,
    *(torch.Tensor.type, torch.result_type, torch.Tensor.to, torch.Tensor.type_as),
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__),
    *(torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.data_ptr),
})  # fmt: skip
"""Functions whose result depends on the dtype of an argument, or gives its values to other code."""

_CONVERTS = frozenset({torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as})
"""Functions that cast their first argument by an operator, which `CastReads.observe` sees.

Only their other arguments count as asked for a dtype. Without other arguments, `type()` returns a dtype.
"""


@final
class CastReads:
    """Observes the reads of weights in a dry run under autocast; see [Note: weights in fp32 under autocast].

    `trace_step` gets its methods `loss` and `observe` as arguments.

    Args:
        partition: the stages.
        loss_function: returns the scalar loss.
        dtype: the dtype of autocast.
    """

    def __init__(self, partition: Partition, loss_function: LossFunction, dtype: torch.dtype) -> None:
        self._partition = partition
        self._loss_function = loss_function
        self._dtype = dtype
        self._cast: Counter[str] = Counter()  # how often operators cast each parameter to 16 bits
        self._uncast: set[str] = set()  # parameters that any other operator reads
        self._shared: set[str] = set()  # parameters with a cast copy whose gradients are added in 16 bits
        self._name_of_memory: dict[int, str] = {}
        self._copies: dict[int, _Copy] = {}

    @property
    def observed(self) -> Partition:
        """The stages for the dry run that is observed: it sends each weight in its own dtype."""
        return self._partition.with_params(_in_own_dtype)

    @property
    def result(self) -> Partition:
        """The stages with the dtypes that weights and gradients need, after the dry run.

        Wire dtypes of 16 bits stay only where the forward reads the weight through casts to this dtype alone.
        """
        return self._partition.with_params(self._needed)

    def _needed(self, param: ParamSpec) -> ParamSpec:
        if param.name not in self._cast or param.name in self._uncast:
            return _in_own_dtype(param)
        full, once = param.name not in self._shared, self._cast[param.name] == 1
        return dataclasses.replace(param, exact_cast=True, full_gradient=full, one_cast=full and once)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss. The dry run calls this while the model has the dry run's parameters."""
        self._name_of_memory = {memory_key(param): name for name, param in named_parameters_of(model)}
        # The mode does not cover the backward, because code of this package reads dtypes there.
        with _ReadsInPython(self._name_of_memory, self._uncast.add, self._shared.add):
            return self._loss_function(model, batch)

    def observe(self, call: OperatorCall) -> None:
        """Note the weights that an operator reads. A view of a weight has the memory of the weight."""
        if call.func.is_view:
            return
        casts = call.func is _CAST and call.out.dtype == self._dtype
        for tensor in operands(call.args):
            key = memory_key(tensor)
            name, copy = self._name_of_memory.get(key), self._copies.get(key)
            if name is not None and not casts:
                self._uncast.add(name)
            elif name is not None and not call.backward:  # a checkpoint casts it again in backward
                self._cast[name] += 1
                self._copies[memory_key(call.out)] = _Copy(name, call.out)
            elif copy is not None and not call.backward:
                copy.num_reads += 1
                if copy.num_reads > 1:
                    self._shared.add(copy.name)


class _ReadsInPython(TorchFunctionMode):
    """Notes the weights that Python code reads in ways that `observe` does not see.

    Args:
        name_of_memory: the name of each parameter, by its memory.
        note_read: called with the name of a weight whose dtype is read, or whose values leave torch.
        note_lstm: called with the name of a weight of an LSTM, which a dry run divides into other operators.
    """

    def __init__(
        self,
        name_of_memory: Mapping[int, str],
        note_read: Callable[[str], None],
        note_lstm: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._name_of_memory = name_of_memory
        self._note_read, self._note_lstm = note_read, note_lstm

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            own = args[1:] if func in _CONVERTS and (len(args) > 1 or kwargs) else args
            self._note((*own, *kwargs.values()), self._note_read)
        elif func is torch.lstm:
            self._note(operands((*args, *kwargs.values())), self._note_lstm)
        return func(*args, **kwargs)

    def _note(self, values: Iterable[object], note: Callable[[str], None]) -> None:
        for value in values:
            name = self._name_of_memory.get(memory_key(value)) if isinstance(value, torch.Tensor) else None
            if name is not None:
                note(name)


@dataclasses.dataclass
class _Copy:
    """A copy of a weight in 16 bits.

    Attributes:
        name: the name of the parameter.
        tensor: the copy, which is kept so that no other tensor gets its memory.
        num_reads: operators of the forward that have read it.
    """

    name: str
    tensor: torch.Tensor
    num_reads: int = 0


def _in_own_dtype(param: ParamSpec) -> ParamSpec:
    return dataclasses.replace(
        param, wire_dtype=param.dtype, exact_cast=False, full_gradient=False, one_cast=False
    )
