"""Decides in which dtype autograd adds the gradients of weights that autocast casts."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils._python_dispatch import _disable_current_modes


def add_gradients_in(dtype: torch.dtype | None, param: torch.Tensor) -> bool:
    """Make autograd convert the gradients of a parameter to a dtype, before it adds them and calls hooks.

    Args:
        dtype: the dtype; `None` for no conversion.
        param: the parameter.

    Returns:
        True if it did not do so before.
    """
    with torch._C.DisableTorchFunctionSubclass():  # the parameter is at rest
        is_new: bool = param.grad_dtype != dtype
        if is_new:
            param.grad_dtype = dtype
    return is_new


def note_read_of_master(param: Any) -> None:
    """Note that autograd records a read of a parameter outside of a forward.

    It reads the master and not a cast. So in the next backward the parameter's gradients are added in fp32.
    """
    home = getattr(param, "home", None)  # a plain parameter has none
    if home is not None and home.spec.one_cast:
        param.is_master_read = True
        add_gradients_in(home.spec.gradient_dtype, param)


@final
class AutocastBlocks:
    """Tells whether all forwards that wait for a backward read the same casts of the weights.

    [Note: one cast in an autocast block] In plain PyTorch, autocast casts a weight when an operator first
    reads it, and keeps the copy until the outermost autocast block ends. All operators and all forwards in
    the block read this copy. So in one backward, autograd adds the gradients of all these reads in 16 bits,
    and casts the sum to fp32. Forwards in different blocks read different copies, whose gradients are added
    in fp32.

    Here a weight has 16 bits already, and autograd can add its gradients in either dtype. If a backward would
    need both, it adds in fp32, and the bits differ from plain PyTorch.

    torch does not say when a block ends. But autocast keeps a copy of any trained fp32 tensor, so a tensor
    without elements shows it: while the block lasts, its cast is the same node of the autograd graph.
    """

    def __init__(self) -> None:
        self._probe: torch.Tensor | None = None
        self._cast: Any = None

    def have_one_cast(self, device: str, *, is_first: bool) -> bool:
        """Return true if autograd must add gradients in 16 bits. Call it at the beginning of each forward.

        Args:
            device: type of the device that computes.
            is_first: true if no other forward waits for a backward.
        """
        before, self._cast = self._cast, self._present_cast(device)
        if not torch.is_autocast_cache_enabled():  # each operator casts the weight again
            return False
        return is_first or (before is not None and before is self._cast)

    def _present_cast(self, device: str) -> Any:
        """Return the node that casts the tensor in the present block, or `None` outside of autocast."""
        if not torch.is_autocast_enabled(device):
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform has its own graphs
            return None
        # Modes of the user's code must not see this product.
        with _disable_current_modes():
            if self._probe is None:  # not made earlier, because an engine may be made in inference mode
                self._probe = torch.zeros(0, 0, device=device, requires_grad=True)
            product = torch.mm(self._probe, self._probe)
        return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]
