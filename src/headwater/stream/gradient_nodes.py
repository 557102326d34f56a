"""Checks of hooks that torch keeps at the node that accumulates the gradient of a parameter.

`torch.autograd.graph.register_multi_grad_hook` compares this node with those of a backward, and a user can
register hooks of the node itself. `param.data = value` gives the parameter another node if the value has
another dtype or device, and then such a hook is never called.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from headwater.core.errors import StreamError
from headwater.core.stage import ParamSpec

_OWN_REFERENCES = 2
"""The result of `sys.getrefcount` if one variable holds an object: the call itself holds a reference too."""


def refuse_lost_hooks(params: Iterable[tuple[nn.Parameter, ParamSpec]], device: torch.device) -> None:
    """Raise if a hook of plain parameters would never be called once they are streamed.

    Args:
        params: the parameters, with their descriptions in the store.
        device: the device that computes.

    Raises:
        StreamError: if there may be such a hook.
    """
    name = _first_lost(((param, spec.wire_dtype, spec.name) for param, spec in params), device)
    if name is not None:
        raise StreamError(
            "a hook of torch.autograd.graph.register_multi_grad_hook, or of the AccumulateGrad node of this "
            "parameter, would not be called any more, because the parameter gets another node if it is "
            "streamed in 16 bits or to another device",
            where=name,
            remedy="remove the hook, and register it after this forward of the compiled model",
        )


def warn_of_lost_hooks(params: Iterable[tuple[nn.Parameter, ParamSpec]], device: torch.device) -> None:
    """Warn if a hook of streamed parameters will never be called once they are plain parameters.

    Args:
        params: the parameters, with their descriptions in the store.
        device: the device of the plain parameters.
    """
    name = _first_lost(((param, spec.dtype, spec.name) for param, spec in params), device)
    if name is not None:
        warnings.warn(
            "a hook of torch.autograd.graph.register_multi_grad_hook, or of the AccumulateGrad node of "
            f"{name}, is not called any more, because the parameter is not streamed any more; register it "
            "again",
            stacklevel=2,
        )


def _first_lost(params: Iterable[tuple[nn.Parameter, torch.dtype, str]], device: torch.device) -> str | None:
    """Return the name of the first parameter whose node is replaced although a Python object holds it.

    Hooks of a node are lost in plain PyTorch, too, unless something holds the node. A graph holds nodes as
    well, but still calls their hooks. A node that only a local variable of a function holds is not found.

    Args:
        params: each parameter, the dtype that it is about to get, and its name.
        device: the device that it is about to get.
    """
    replaced = [
        (get_gradient_edge(param).node, name)
        for param, dtype, name in params
        if param.requires_grad and not param.is_meta
        if (param.dtype, param.device.type) != (dtype, device.type)
    ]
    in_question = [pair for pair in replaced if sys.getrefcount(pair[0]) > _OWN_REFERENCES]
    if not in_question:
        return None
    # The search takes long, but is rare: in some versions of torch, an existing graph counts as a reference.
    own = set(map(id, replaced))
    holders = (each for each in gc.get_referrers(*(node for node, _ in in_question)) if id(each) not in own)
    held = {id(each) for holder in holders for each in gc.get_referents(holder)}
    return next((name for node, name in in_question if id(node) in held), None)
