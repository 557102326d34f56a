"""The older API, built around a `Session`: `import headwater.framework.torch as cbtorch`."""

from __future__ import annotations

import enum
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn

from headwater.api.backend import Backend, backend
from headwater.api.compile import compile as compile_model
from headwater.core.errors import ConfigError, StreamError
from headwater.core.placement import JOB
from headwater.core.process_value import ProcessValue
from headwater.utils.data import DataExecutor, DataLoader

__all__ = ["Session", "dataloader", "initialize", "modes", "module", "optimizer"]

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

_backend = ProcessValue[Backend | None](None)
"""The backend that `initialize` has chosen. Global, because `module` has no argument for it."""
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class modes(enum.Enum):
    """Modes of a session: training or evaluation."""

    TRAIN = "train"
    EVAL = "eval"


def initialize(backend_type: str = "CSX", *, cs_ip: str | None = None, **options: Any) -> None:
    """Choose the device on which models run. Call it before the other functions of this module.

    Args:
        backend_type: `CSX`, `CPU` or `GPU`.
        cs_ip: the address of a Cerebras system; accepted for compatibility and ignored, with a warning.
        options: further arguments of `headwater.backend`.

    Raises:
        ConfigError: if `cs_ip` is the address `ssh://…` of an appliance, which cannot take over a script that
            runs already.
    """
    if cs_ip is not None and cs_ip.startswith("ssh://") and JOB not in os.environ:
        raise ConfigError(
            f"the script runs on this machine, and cannot move to {cs_ip}",
            where="initialize(cs_ip=…)",
            remedy=f"start it there: headwater --appliance {cs_ip} jobs submit --follow -- python SCRIPT …",
        )
    if cs_ip is not None and not cs_ip.startswith("ssh://"):
        logger.warning("initialize: cs_ip=%r is ignored; models run on this machine", cs_ip)
    _backend.value = backend(backend_type, **options)


def module(model: M) -> M:
    """Compile a model for the backend and return it; sessions set its mode.

    Raises:
        StreamError: if `initialize` has not been called.
    """
    if _backend.value is None:
        raise StreamError(
            "initialize() has not been called",
            where="module",
            remedy="first call initialize(), for example initialize('CSX')",
        )
    compiled = compile_model(model, _backend.value)
    _models.add(compiled)
    return compiled


def dataloader(source: Callable[[], Iterable[Any]] | Iterable[Any]) -> DataExecutor:
    """Return an iterable of batches on the device; each iteration is one pass over the data.

    Args:
        source: a loader, or an input function that returns one.
    """
    return DataExecutor(source if isinstance(source, Iterable) else DataLoader(source))


def optimizer(torch_optimizer: Opt) -> Opt:
    """Return the optimizer unchanged: any torch optimizer works with streamed parameters.

    Raises:
        ConfigError: if it is not a torch optimizer.
    """
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"expected a torch.optim.Optimizer, got {type(torch_optimizer).__name__}",
            where="optimizer",
            remedy="pass an object such as torch.optim.AdamW(model.parameters())",
        )
    return torch_optimizer


class Session:
    """A context that puts all models in one mode: `with Session(dataloader, modes.TRAIN) as batches: …`.

    `modes.TRAIN` means `model.train()` with gradients, `modes.EVAL` means `model.eval()` without gradients.
    On exit every module's mode and torch's gradient mode are restored.

    Args:
        dataloader: a return value of `dataloader`. Iterating over the session iterates over it.
        mode: `modes.TRAIN` or `modes.EVAL`.

    Raises:
        ConfigError: if `mode` is not one of these.
    """

    def __init__(self, dataloader: Iterable[Any], mode: modes) -> None:
        if not isinstance(mode, modes):
            raise ConfigError(
                f"unknown mode {mode!r}", where="Session", remedy="write modes.TRAIN or modes.EVAL"
            )
        self._batches = dataloader
        self._trains = mode is modes.TRAIN
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(self._trains))
            for model in _models:
                undo.enter_context(_in_mode(model, self._trains))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


@contextmanager
def _in_mode(model: nn.Module, trains: bool) -> Iterator[None]:
    before = [(part, part.training) for part in model.modules()]
    model.train(trains)
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
