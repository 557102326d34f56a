"""`compile`: from a module to one whose weights are streamed."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from headwater.api import optimizers as _optimizers  # noqa: F401 its hook serves streamed parameters
from headwater.api.backend import Backend, current_backend
from headwater.api.backend import backend as make_backend
from headwater.api.streamed import StreamedModel
from headwater.core.empty import fill_parameters
from headwater.core.errors import StreamError

Module = TypeVar("Module", bound=nn.Module)

_ATTRIBUTE = "_headwater"


def compile(model: Module, backend: Backend | str | None = None) -> Module:
    """Make a module compute where `backend` says; it is the same module that comes back.

    For `"CSX"` its weights are streamed from the first forward on, which decides the plan by the shapes that
    it is called with. Its parameters stay the objects that they are, so optimizers may be built before or
    after. Between forwards they are read from the weight store and written to it.

    Args:
        model: any module.
        backend: what `headwater.backend` gave, or its name; if not given the one chosen last, or `"CSX"`.

    Returns:
        `model`.

    Raises:
        StreamError: if it is compiled already.
        ConfigError: if there is no such backend.
    """
    if isinstance(backend, str):
        backend = make_backend(backend)
    backend = backend or current_backend() or make_backend("CSX")
    if is_compiled(model):
        raise StreamError(
            f"this {type(model).__name__} is compiled already",
            where="compile",
            remedy="compile a model once; headwater.release(model) ends it",
        )
    if backend.kind == "CSX":
        setattr(model, _ATTRIBUTE, StreamedModel(model, backend))
    else:
        fill_parameters(model)
        model.to(backend.torch_device)
        setattr(model, _ATTRIBUTE, None)
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile` was called with this module."""
    return hasattr(model, _ATTRIBUTE)


def streamed(model: nn.Module) -> StreamedModel | None:
    """What streams this module, if anything does."""
    found: StreamedModel | None = getattr(model, _ATTRIBUTE, None)
    return found


def release(model: Module) -> Module:
    """End what `compile` began: the module has its weights in host memory again.

    Args:
        model: a compiled module; its weights must fit.

    Returns:
        `model`.
    """
    current = streamed(model)
    if current is not None:
        current.release()
    if is_compiled(model):
        delattr(model, _ATTRIBUTE)
    return model
