"""The memory to which parameters point while they are not bound.

[Note: former memory] The backward of a graph from before streaming, such as a penalty on weights, reads the
memory to which a parameter points then. So a parameter that such a graph may have saved points to its former
memory between forwards, until no backward can need it. All other parameters point to placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from headwater.core.stage import ParamSpec
from headwater.stream.placeholders import without_values


@final
class UnboundMemory:
    """The tensors to which the parameters of a stage point while they are not bound.

    Attributes:
        tensors: a tensor for each parameter: a placeholder, or its former memory; see [Note: former memory].

    Args:
        specs: the parameters.
        device: the device that computes.
    """

    def __init__(self, specs: Sequence[ParamSpec], device: torch.device) -> None:
        self._specs = specs
        self._device = device
        self.tensors = [self._placeholder(index) for index in range(len(specs))]
        self._former: dict[int, int] = {}  # versions of the parameters that point to their former memory

    def _placeholder(self, index: int) -> torch.Tensor:
        spec = self._specs[index]
        return without_values(spec.shape, spec.wire_dtype, self._device)

    def keep(self, index: int, param: nn.Parameter) -> None:
        """Keep the memory of a parameter that is about to be streamed, if a graph may have saved it."""
        # A placeholder of an engine that this one replaces has no values.
        if param.untyped_storage().nbytes() < param.nbytes or not may_be_saved(param):
            return
        value = self.tensors[index]
        if (param.dtype, param.device) == (value.dtype, value.device):
            self._former[index] = version_of(param)
            self.tensors[index] = param.data
        else:
            # The backward of such a graph would compute with NaN. After this it raises torch's error.
            torch.autograd.graph.increment_version(param)

    def drop(self, params: Sequence[nn.Parameter], *, always: bool) -> bool:
        """Replace former memory by placeholders once no backward can need it: torch refuses old versions.

        Args:
            params: the parameters.
            always: also replace memory that a backward may need.

        Returns:
            True if this was the last former memory of the stage.
        """
        had_any = bool(self._former)
        for index, version in list(self._former.items()):
            if always or version_of(params[index]) != version or not may_be_saved(params[index]):
                del self._former[index]
                self.tensors[index] = self._placeholder(index)
        return had_any and not self._former


def version_of(param: nn.Parameter) -> int:
    """Return how often a parameter has been changed in place."""
    with torch._C.DisableTorchFunctionSubclass():  # at rest this would take ten times as long
        return param._version


def may_be_saved(param: nn.Parameter) -> bool:
    """True if a graph may have saved a parameter: torch counts more references than the usual ones."""
    usual, node = 1, None  # the Python object
    if param.requires_grad:
        # A graph that has saved a trained parameter made the node that gets its gradient, which counts too.
        usual, node = 2, torch.autograd.graph.get_gradient_edge(param)
    with torch._C.DisableTorchFunctionSubclass():
        references: int = torch.Tensor._use_count(param)  # type: ignore[attr-defined]
    del node  # kept until here, because the count above includes its reference
    return references > usual
