"""Calls of a model by the user's loop: a guard around each call, and the loss of the dry run."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.parameter import is_lazy as is_uninitialized

from headwater.core.errors import StreamError
from headwater.core.module_calls import surround
from headwater.core.module_parameters import parameters_of
from headwater.core.precision import Precision
from headwater.core.seeding import derive_seed, drawing_devices, seed_generators
from headwater.core.trees import tensors_in
from headwater.core.uncompiled import CompilerOffWarning
from headwater.fabric.membership import current
from headwater.stream.addresses import free_copies
from headwater.stream.at_rest import refresh_views

_PRECISION_OF = {torch.bfloat16: Precision("bf16"), torch.float16: Precision("fp16")}
_NO_HOOKS = "don't yet support saved tensor hooks"
"""A part of the message that torch raises if a hook is set inside a transform of torch.func."""

_SETS_OR_DISABLES_HOOKS = {
    saved_tensors_hooks.__enter__.__code__,
    inspect.unwrap(disable_saved_tensors_hooks).__code__,
}
"""The functions of torch that raise an error if saved-tensor hooks are both set and disabled."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call of the model."""


_WHOLE_GRAPH = re.compile("streamed by headwater|_higher_order_ops")
"""Text in errors of torch's compiler if it met this package, or an operator such as `torch.cond`."""


def guard_call(
    model: nn.Module,
    before: Callable[[tuple[Any, ...], dict[str, Any]], Exception | None],
    surroundings: Callable[[], AbstractContextManager[None]],
    clean_up: Callable[[], None],
) -> Callable[[], None]:
    """Wrap every later call of a model. `before` runs before the call and before all of the model's hooks.

    Args:
        model: the model.
        before: called first, with the arguments of the call. If it returns an error, the error is raised
            after the call, unless the call itself raises another one.
        surroundings: returns the context in which the model is called.
        clean_up: called when the call is interrupted (for example by KeyboardInterrupt).

    Returns:
        A function that ends the guard.

    Raises:
        StreamError: from the guarded call, if a transform of torch.func runs in the forward, or if hooks for
            saved tensors are disabled.
    """

    def guarded(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            refresh_views((args, kwargs))
            free_copies()
            error = before(args, kwargs)
            with surroundings():
                output = call(*args, **kwargs)
            if error is not None:
                raise error
            return output
        except BaseException as raised:
            if not isinstance(raised, Exception):
                clean_up()
            if isinstance(raised, RuntimeError) and _NO_HOOKS in str(raised):
                raise _no_transforms(model) from raised
            if type(raised).__module__ == "torch._dynamo.exc" and _WHOLE_GRAPH.search(str(raised)):
                raise _no_whole_graph(model) from raised
            if isinstance(raised, RuntimeError) and _are_hooks_disabled(raised):
                raise _hooks_disabled(model) from raised
            raise

    def note_compiler() -> None:
        warnings.warn(
            f"torch.compile of a whole streamed model has no effect on this {type(model).__name__}, because "
            "streaming runs outside of compiled code: compile its parts (`part.compile()`) or the functions "
            "that they call",
            CompilerOffWarning,
            stacklevel=2,
        )

    return surround(model, guarded, outermost=True, if_compiled=note_compiler)


def _no_whole_graph(model: nn.Module) -> StreamError:
    """Return the error for a function in a forward that torch must compile as a whole."""
    return StreamError(
        "the forward calls a function that torch compiles as a whole (torch.cond, torch.while_loop, or "
        "torch.compile with fullgraph=True), and this function uses streamed weights",
        where=type(model).__name__,
        remedy="write it in Python, for example `if` and `for` instead of torch.cond and torch.while_loop; "
        "or compile without fullgraph=True",
    )


def _no_transforms(model: nn.Module) -> StreamError:
    """Return the error for a transform of torch.func in the forward. Saved-tensor hooks fail in it."""
    return StreamError(
        "torch.func's grad, vjp, jacrev and hessian cannot be used in the forward of a streamed model",
        where=type(model).__name__,
        remedy="use torch.autograd.grad, with create_graph=True if the loss depends on the gradient",
    )


def _are_hooks_disabled(error: RuntimeError) -> bool:
    """True if torch raised the error because saved-tensor hooks are both set and disabled."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # The text of the error cannot be compared, because the user's code chooses it.
    return bool(frames) and frames[-1].f_code in _SETS_OR_DISABLES_HOOKS


def _hooks_disabled(model: nn.Module) -> StreamError:
    """Return the error for a forward in `torch.autograd.graph.disable_saved_tensors_hooks`."""
    return StreamError(
        "the forward of a streamed model sets hooks for saved tensors, and "
        "torch.autograd.graph.disable_saved_tensors_hooks forbids them",
        where=type(model).__name__,
        remedy="call the model outside of that context, and leave the context out of its forward",
    )


def is_lazy(model: nn.Module) -> bool:
    """True if parameters or buffers get their shapes in the first call of the model (lazy modules).

    That call must run as in plain PyTorch: it draws the initial values, and the order in which random numbers
    are drawn must stay the same.

    Raises:
        StreamError: if there are such tensors and several ranks, whose initial values would differ.
    """
    lazy = any(is_uninitialized(tensor) for tensor in (*parameters_of(model), *model.buffers()))
    if lazy and current().size > 1:
        raise StreamError(
            "the model has lazy modules, but several ranks need all shapes before the first call",
            where=type(model).__name__,
            remedy="call the model once before headwater.compile, which gives lazy modules their shapes",
        )
    return lazy


_forwards = itertools.count()


@contextmanager
def own_randomness(rank: int) -> Iterator[None]:
    """Enter a context in which each rank draws different random numbers; outside all ranks draw the same.

    Args:
        rank: this rank.
    """
    # The new seed depends on the generator's state, not on its seed: the script may have drawn numbers since.
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    with torch.random.fork_rng(devices=drawing_devices()):
        # `fork_rng` restores the state. Without the count, every forward would draw the same numbers. Instead
        # one could draw from the common generator, but if only some ranks did so, their states would differ.
        seed_generators(derive_seed(state, next(_forwards), rank))
        yield


def autocast_precision(device: str) -> Precision:
    """Return the precision that the caller's autocast context asks for; fp32 outside of autocast."""
    if not torch.is_autocast_enabled(device):
        return Precision()
    return _PRECISION_OF.get(torch.get_autocast_dtype(device), Precision())


def serves_call(planned: Precision, device: str) -> bool:
    """True if weights of this precision can be used by a call under the present autocast state.

    Weights in fp32 serve every call, because autocast casts them. Weights in bf16 or fp16 serve only calls
    under autocast to that dtype.

    Args:
        planned: the precision of the plan.
        device: the device that computes.
    """
    return not planned.mixed or autocast_precision(device).name == planned.name


def stand_in_loss(model: nn.Module, call: Call) -> torch.Tensor:
    """Return a loss for the dry run, computed from any output of the model.

    The user's loss is not known before the user calls it. A scalar output is used as the loss. For any other
    output the loss is the sum of a log-softmax over the last dimension. It saves one tensor of the output's
    size for backward, like a cross-entropy. If the model returns a dictionary with a `loss`, as models of
    transformers do, its other outputs are only added.
    """
    args, kwargs = call
    result = model(*args, **kwargs)
    has_loss = isinstance(result, Mapping) and isinstance(result.get("loss"), torch.Tensor)
    losses = [
        _loss_of(output, only_add=has_loss)
        for output in tensors_in(result)
        if output.requires_grad or not torch.is_grad_enabled()
    ]
    return sum(losses, torch.zeros((), device="cpu"))


def _loss_of(output: torch.Tensor, *, only_add: bool) -> torch.Tensor:
    # Softmax and sum are not defined for these layouts.
    if output.is_nested or output.layout is not torch.strided:
        output = _elements(output)
    if output.is_complex():
        output = torch.view_as_real(output.resolve_conj())  # only a real loss has a gradient
    if output.dim() == 0 or not output.is_floating_point():
        return output.float()
    return output.sum().float() if only_add else output.float().log_softmax(-1).sum()


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor with the elements of a nested or sparse tensor."""
    if tensor.is_nested:
        return tensor.values() if tensor.layout is torch.jagged else tensor.to_padded_tensor(0.0)
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
