"""The parameters of modules of any class, also of one that overrides `parameters` or `named_parameters`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_parameters_of(
    module: nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters of a module, as `nn.Module.named_parameters` does.

    A class may override the method, for example to return only the parameters that an optimizer should get.

    Args:
        module: the module.
        recurse: true to include the parameters of its parts.
        remove_duplicate: true to yield each parameter once.
    """
    return nn.Module.named_parameters(module, recurse=recurse, remove_duplicate=remove_duplicate)


def parameters_of(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, each once, as `nn.Module.parameters` does.

    Args:
        module: the module.
        recurse: true to include the parameters of its parts.
    """
    return (param for _, param in named_parameters_of(module, recurse=recurse))
