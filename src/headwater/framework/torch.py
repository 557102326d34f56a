"""The older session form: `import headwater.framework.torch as cbtorch`."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn

from headwater.api.backend import Backend, backend
from headwater.api.compile import compile as compile_model
from headwater.core.errors import ConfigError, StreamError
from headwater.utils.data import DataExecutor, DataLoader

__all__ = ["Session", "dataloader", "initialize", "modes", "module", "optimizer"]

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

_backend: Backend | None = None
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class modes(enum.Enum):
    """What a session does with the models."""

    TRAIN = "train"
    EVAL = "eval"


def initialize(backend_type: str = "CSX", *, cs_ip: str | None = None, **options: Any) -> None:
    """Choose where models run, before anything else is called.

    Args:
        backend_type: `CSX`, `CPU` or `GPU`.
        cs_ip: the address of a wafer-scale system; accepted, without effect.
        options: as `headwater.backend` takes them.
    """
    global _backend
    _backend = backend(backend_type, **options)


def module(model: M) -> M:
    """Compile a model for the backend; sessions set its mode.

    Raises:
        StreamError: before `initialize`.
    """
    if _backend is None:
        raise StreamError("there is no backend yet", where="module", remedy="call initialize() first")
    compiled = compile_model(model, _backend)
    _models.add(compiled)
    return compiled


def dataloader(source: Callable[[], Iterable[Any]] | Iterable[Any]) -> DataExecutor:
    """The batches of a loader, or of what an input function returns, one pass at a time, on the device."""
    return DataExecutor(source if isinstance(source, Iterable) else DataLoader(source))


def optimizer(torch_optimizer: Opt) -> Opt:
    """The optimizer as it is: one over the parameters of a compiled model streams already.

    Raises:
        ConfigError: if it is no torch optimizer.
    """
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"a torch.optim.Optimizer is wanted, found {type(torch_optimizer).__name__}", where="optimizer"
        )
    return torch_optimizer


class Session:
    """Within it all models are in one mode: `with Session(dataloader, modes.TRAIN) as batches: …`.

    Training and evaluation modes are as torch's, with gradients in training alone; both are as before
    afterwards.

    Args:
        dataloader: what `dataloader` gave. Iterating over the session iterates over it.
        mode: `modes.TRAIN` or `modes.EVAL`.

    Raises:
        ConfigError: for another mode.
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
