"""Torch's own writer for TensorBoard, imported when it is asked for; it takes the tensors of closures.

Of several ranks the first writes; to the others a writer is an object that does nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.fabric.membership import current

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["SummaryWriter"]


def __getattr__(name: str) -> Any:
    if name != "SummaryWriter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"SummaryWriter needs {error.name}",
            remedy="pip install 'headwater[plot]', or leave the writer out",
        ) from error
    return _of_first_rank(SummaryWriter)


@cache
def _of_first_rank(writer: type[SummaryWriter]) -> type[SummaryWriter]:
    """A class whose objects write if they are made on the first rank."""

    class SummaryWriter(writer):  # type: ignore[misc]
        """Torch's writer; of several ranks the first writes."""

        def __new__(cls, *args: Any, **kwargs: Any) -> SummaryWriter:
            asked: Any = cls
            made: SummaryWriter = object.__new__(asked if current().rank == 0 else _silent_class(asked))
            return made

    return SummaryWriter


@cache
def _silent_class(writer: Any) -> Any:
    """A class of writers that take what theirs take, and do nothing."""
    methods = {
        name: _nothing
        for base in writer.__mro__[:-1]
        for name, value in vars(base).items()
        if callable(value) and name not in ("__new__", "__enter__", "__exit__")
    }

    own = {"__init__": _name_folder, "get_logdir": lambda self: self.log_dir}
    return type(writer.__name__, (writer,), {**methods, **own})


def _name_folder(self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
    """Know the folder alone."""
    self.log_dir = "runs" if log_dir is None else str(log_dir)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write nothing."""
