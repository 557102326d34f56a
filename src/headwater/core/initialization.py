"""Random initial values of single parameters, by the rules of their model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule


def is_transformers_model(model: nn.Module) -> bool:
    """Return true if `model` is a `PreTrainedModel`."""
    transformers = sys.modules.get("transformers")  # None if not imported: then no model is of its class
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def initialize(model: nn.Module, names: Collection[str]) -> None:
    """Give parameters random initial values, by the rules of the modules that hold them.

    In a model of the transformers library, the rules of the modules around these follow, from the inside out,
    as in the library: the rule of an outer module may replace that of an inner one. The rules set other
    parameters of these modules too; see `others_without_memory`.

    Args:
        model: the model.
        names: the parameters, which have memory. The rules may leave some of their elements unchanged.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    paths = dict.fromkeys(path for owner in owners for path in _from_inside(owner))
    with torch.no_grad():
        for path in sorted(paths, key=lambda path: len(_from_inside(path)), reverse=True):
            module: Any = model.get_submodule(path)
            around = map(model.get_submodule, _from_inside(path))
            # The innermost model decides: it may initialise its parts in another way than the one around it.
            library_model: Any = next(filter(is_transformers_model, around), None)
            if library_model is not None:
                library_model._init_weights(module)
            elif path in owners and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def _from_inside(path: str) -> list[str]:
    """Return the path of a module, and then the paths of all modules around it."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


@contextmanager
def others_without_memory(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Enter a context in which all parameters but `names` are on the meta device: no rule changes them."""
    kept = {id(model.get_parameter(name)) for name in names}
    others = [
        (module._parameters, name, param)
        for module in model.modules()
        if not isinstance(module, ScriptModule)
        for name, param in module._parameters.items()
        if param is not None and not param.is_meta and id(param) not in kept
    ]
    for registry, name, param in others:
        outline = torch.empty(param.shape, dtype=param.dtype, device="meta")
        registry[name] = nn.Parameter(outline, requires_grad=param.requires_grad)
    try:
        yield
    finally:
        for registry, name, param in others:
            registry[name] = param
