"""Decides in which dtype autograd adds the gradients of weights that autocast casts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


def add_gradients_in(dtype: torch.dtype | None, param: torch.Tensor) -> bool:
    """Make autograd convert the gradients of a parameter to a dtype, before it adds them and calls hooks.

    Args:
        dtype: the dtype; `None` for no conversion.
        param: the parameter.

    Returns:
        True if autograd did not convert to this dtype before.
    """
    with torch._C.DisableTorchFunctionSubclass():  # the parameter is at rest
        is_new: bool = param.grad_dtype != dtype
        if is_new:
            param.grad_dtype = dtype
    return is_new


def note_read_of_master(param: Any) -> None:
    """Record that the user's code reads a parameter outside of a forward, with gradients.

    Such a read gets the fp32 master. So in the next backward the parameter's gradients are added in fp32.
    """
    home = getattr(param, "home", None)  # a plain parameter has no `home`
    if home is not None and home.spec.one_cast:
        param.is_master_read = True
        add_gradients_in(home.spec.gradient_dtype, param)


@final
class ForwardMark:
    """An object that stays alive as long as any tensor that autograd has saved in one forward."""


@final
class AutocastBlocks:
    """Tells whether the forwards whose backward is still to come read the same casts of the weights.

    [Note: one cast in an autocast block] In plain PyTorch, autocast casts a weight when an operator first
    reads it, and keeps the copy until the outermost autocast block ends. All operators and all forwards in
    the block read this copy. So in one backward, autograd adds the gradients of all these reads in 16 bits,
    and casts the sum to fp32. Forwards in different blocks read different copies, whose gradients are added
    in fp32.

    Here a weight has 16 bits already, and autograd can add its gradients in either dtype, but not in both in
    one backward. It adds in 16 bits only if no forward in another block can wait for a backward. The tensors
    that autograd saves in a forward keep an object, the mark of the forward. A forward may wait as long as
    its mark exists, but not after the weights have changed.

    torch does not say when a block ends. But autocast keeps its copy of any trained fp32 tensor until then.
    So each forward casts a tensor without elements: as long as the cast is the same node of the autograd
    graph, the block is the same.
    """

    def __init__(self) -> None:
        self._probe: torch.Tensor | None = None
        self._cast: Any = None
        self._version: object = None
        self._waiting: WeakSet[ForwardMark] = WeakSet()
        self._are_mixed = False  # the forwards that may wait for a backward have read different casts

    def begin_forward(self, device: str, version: object) -> tuple[bool, ForwardMark]:
        """Begin a forward with gradients.

        Before this call, the caller must drop its own reference to the mark of the previous forward.

        Args:
            device: type of the device that computes.
            version: changes when the weights change.

        Returns:
            A flag, true if autograd must add gradients in 16 bits; and the mark of the forward.
        """
        before, self._cast = self._cast, self._present_cast(device)
        if version != self._version or not self._waiting:
            self._version, self._are_mixed = version, False
            self._waiting.clear()
        elif before is None or before is not self._cast:
            self._are_mixed = True
        if not torch.is_autocast_cache_enabled():  # each operator casts the weight again
            self._are_mixed = True
        mark = ForwardMark()
        self._waiting.add(mark)
        return not self._are_mixed, mark

    def _present_cast(self, device: str) -> Any:
        """Return the node that casts the tensor in the present block, or `None` outside of autocast."""
        if not torch.is_autocast_enabled(device):
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform has its own graphs
            return None
        # Modes and hooks of the user's code, and those of a checkpoint, must not see this product.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), _without_hooks():
            if self._probe is None:  # not made earlier, because an engine may be made in inference mode
                self._probe = torch.zeros(0, 0, device=device, requires_grad=True)
            product = torch.mm(self._probe, self._probe)
        return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]


def _without_hooks() -> AbstractContextManager[object]:
    """Return a context in which the present hooks for saved tensors are not called."""
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return nullcontext()  # where hooks are disabled, none can be called
