"""Exports one call of a module by `torch.export`, on fake tensors, with the weights as arguments."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.func import functional_call

from headwater.core.module_parameters import named_parameters_of
from headwater.core.trees import map_tensors, tensors_in
from headwater.plan.capture.record import ModuleCall

_LOUD = ("torch.export", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers of torch that print errors which are raised too."""


class StageFunction(nn.Module):
    """A module as a function of its weights and of the tensors among its arguments.

    Args:
        stage: the module.
        call: holds the arguments that are not tensors.
        names: each name of a parameter or buffer -> the first name of the same tensor.
    """

    def __init__(self, stage: nn.Module, call: ModuleCall, names: Mapping[str, str]) -> None:
        super().__init__()
        self.stage = stage
        self._call = call
        self._names = names

    def forward(self, weights: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in the result of the module, without the containers around them."""
        tensors = iter(inputs)
        args, kwargs = map_tensors(lambda _: next(tensors), (self._call.args, self._call.kwargs))
        state = {name: weights[first] for name, first in self._names.items()}
        return tensors_in(functional_call(self.stage, state, args, kwargs))


def export_call(module: nn.Module, call: ModuleCall) -> ExportedProgram:
    """Return the program of one call of `module`, whose parameters must be fake.

    Raises:
        Exception: any error of the module's forward or of torch.export.
    """
    state = [
        *named_parameters_of(module, remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in state}
    weights = {name: tensor for name, tensor in state if names[name] == name}
    # The inputs are new leaf tensors, because the recorded ones belong to graph and fake mode of the dry run.
    inputs = [_fresh(tensor) for tensor in tensors_in((call.args, call.kwargs))]
    function = StageFunction(module, call, names)
    with _without_state(module):
        return torch.export.export(function, (weights, inputs), strict=False)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad, device="cpu"
    )


@contextlib.contextmanager
def _without_state(module: nn.Module) -> Iterator[None]:
    """Remove parameters and buffers from `module` inside the context: weights can only be arguments then."""
    holders: list[dict[str, object]] = []
    for inner in module.modules():
        holders += [inner._parameters, inner._buffers]  # type: ignore[list-item]
    before = [dict(holder) for holder in holders]
    try:
        for holder in holders:
            holder.update(dict.fromkeys(holder))
        yield
    finally:
        for holder, tensors in zip(holders, before, strict=True):
            holder.update(tensors)


def serialise(program: ExportedProgram) -> bytes:
    """Return the program as the bytes of a file. The file is read once to check it.

    Example inputs are left out: they are fake, and would be pickled.

    Raises:
        Exception: any error of torch.export.
    """
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.export.load(file)
    return file.getvalue()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing the errors that it raises."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
