"""`compile`, which streams the weights of a module, and `release`, which ends the streaming."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from headwater.api import step_hooks as _step_hooks  # noqa: F401 they serve streamed parameters
from headwater.api.backend import Backend, current_backend
from headwater.api.backend import backend as make_backend
from headwater.api.model_structure import refuse_no_module
from headwater.api.streamed import ATTRIBUTE, StreamedModel, refuse_compiled_parts
from headwater.core.empty import fill_parameters
from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.core.module_parameters import parameters_of
from headwater.models.library_loss import divide_losses, join_losses
from headwater.stream.left_gradients import forget_trained

Module = TypeVar("Module", bound=nn.Module)


@uninterrupted
def compile(model: Module, backend: Backend | str | None = None) -> Module:
    """Make a module compute on a backend, and return the same module.

    On `"CSX"` the weights are streamed from the first forward on. The plan is made at that forward, from the
    shapes of its arguments. The parameters stay the same objects, so optimizers may be built before or after
    `compile`. Between forwards, parameters are read from the weight store and written to it.

    Args:
        model: any module.
        backend: the result of `headwater.backend`, or the name of a backend. If not given: the backend that
            was chosen last, or `"CSX"`.

    Returns:
        `model`.

    Raises:
        StreamError: if the module, or a module in it, is compiled already, if it is of TorchScript, or if
            accelerate keeps its weights elsewhere.
        ConfigError: if the backend is not known, or `model` is not a module.
    """
    refuse_no_module(model, where="compile")
    if isinstance(backend, str):
        backend = make_backend(backend)
    backend = backend or current_backend() or make_backend("CSX")
    if is_compiled(model):
        raise StreamError(
            f"this {type(model).__name__} is compiled already",
            where="compile",
            remedy="compile a model once; to compile it again, first call headwater.release(model)",
        )
    if backend.kind == "CSX":
        _refuse_compiled_by_torch(model)
        _refuse_offloaded_by_accelerate(model)
        refuse_compiled_parts(model)
        divide_losses(model)
        setattr(model, ATTRIBUTE, StreamedModel(model, backend))
    else:
        # Parameters get their values first: torch cannot move parameters without values to a device.
        fill_parameters(model)
        model.to(backend.torch_device)
        setattr(model, ATTRIBUTE, None)
    return model


def _refuse_compiled_by_torch(model: nn.Module) -> None:
    # Not by the class itself, whose import takes a second.
    if type(model).__module__.startswith("torch._dynamo.") and hasattr(model, "_orig_mod"):
        raise StreamError(
            "expected a module, got the result of torch.compile(model), which runs the whole model at once",
            where="compile",
            remedy="call headwater.compile(model) with the original model; to compile its parts, call "
            "block.compile() for each block",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise StreamError(
            "expected a module of Python, got one of TorchScript, which runs the whole model at once",
            where="compile",
            remedy="call headwater.compile(model) with the original model; or stream it as a single stage: "
            "headwater.compile(torch.nn.Sequential(model))",
        )


def _refuse_offloaded_by_accelerate(model: nn.Module) -> None:
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
            raise StreamError(
                "accelerate keeps the weights of this module elsewhere and copies them at each forward "
                "(device_map, cpu_offload or disk_offload)",
                where=name or type(model).__name__,
                remedy="load the model without device_map: build it within backend.device, then call "
                "headwater.load_pretrained(model, FOLDER); or, if it fits in memory, first call "
                "accelerate.hooks.remove_hook_from_submodules(model)",
            )


def is_compiled(model: nn.Module) -> bool:
    """Return true if the module is compiled."""
    return getattr(model, ATTRIBUTE, False) is not False


def streamed(model: nn.Module) -> StreamedModel | None:
    """Return the object that streams this module, or `None` if the module is not streamed."""
    found = getattr(model, ATTRIBUTE, None)
    return found if isinstance(found, StreamedModel) else None


@uninterrupted
def release(model: Module) -> Module:
    """Undo `compile`: copy the weights back to host memory, and end the streaming.

    Gradients, optimizer state and buffers are in host memory afterwards, too.

    Args:
        model: a compiled module. Weights, gradients, optimizer state and buffers must fit into host memory.

    Returns:
        `model`.
    """
    current = streamed(model)
    if current is not None:
        current.release()
        join_losses(model)
        forget_trained(parameters_of(model))
    if is_compiled(model):
        delattr(model, ATTRIBUTE)
    return model
