"""Tensors at rest that are arguments of a transform of `torch.func`, as in `torch.func.grad(f)(weight)`.

`vmap`, `grad` and `vjp` wrap each tensor argument in a new tensor. They do this by a function in C,
which does not call `__torch_function__`. Operations on the wrapper then read the memory of the placeholder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, predispatch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from headwater.stream.placeholders import NotTraced

_WRAPPERS = ((predispatch, "_add_batch_dim_impl"), (eager_transforms, "_wrap_for_grad"))
"""The names by which torch's Python code calls the functions that wrap an argument."""


@functools.cache
def read_before_transforms() -> None:
    """Replace the functions that wrap arguments: they wrap a copy of the values of a tensor at rest.

    The graph of the copy leads to the weight.
    """
    for module, name in _WRAPPERS:
        setattr(module, name, _on_copies(getattr(module, name)))


def _on_copies(wrap: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrap_copy(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if isinstance(tensor, NotTraced):
            with temporarily_clear_interpreter_stack():  # the read is not part of the transform
                tensor = tensor.clone()
        return wrap(tensor, *args)

    return wrap_copy
