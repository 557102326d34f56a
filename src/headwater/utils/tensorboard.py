"""`SummaryWriter`, torch's writer for TensorBoard files, imported on first use.

With several ranks only rank 0 writes. On the other ranks all methods of a writer do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.files import disk_errors
from headwater.core.packages import importing
from headwater.fabric.membership import current

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["SummaryWriter"]


def __getattr__(name: str) -> Any:
    if name != "SummaryWriter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing("SummaryWriter", "plot", otherwise="remove the writer"):
        from torch.utils.tensorboard import SummaryWriter
    return _of_first_rank(SummaryWriter)


@cache
def _of_first_rank(writer: type[SummaryWriter]) -> type[SummaryWriter]:
    """Return a subclass of `writer` whose objects write on rank 0 and do nothing on other ranks."""
    # A subclass, so that `isinstance` and the subclasses of scripts work. `__new__` runs after the script has
    # joined its ranks, unlike the import of this module.

    class SummaryWriter(writer):  # type: ignore[misc]
        """Torch's `SummaryWriter`, which writes on rank 0 only, with errors of this project."""

        def __new__(cls, *args: Any, **kwargs: Any) -> SummaryWriter:
            requested: Any = cls
            kind = requested if current().rank == 0 else _silent_class(requested)
            instance: SummaryWriter = object.__new__(kind)
            return instance

    for name, method in vars(writer).items():
        if callable(method):
            setattr(SummaryWriter, name, _with_disk_errors(method))
    return SummaryWriter


def _with_disk_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a writer whose errors of the system are errors of this project."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch sets `log_dir` before it makes the folder.
        try:
            return method(self, *args, **kwargs)
        except OSError:
            with disk_errors(Path(self.log_dir)):
                raise

    return call


@cache
def _silent_class(writer: Any) -> Any:
    """Return a subclass of `writer` in which all methods accept their arguments and do nothing."""
    methods = {
        name: _nothing
        for base in writer.__mro__[:-1]
        for name, value in vars(base).items()
        if callable(value) and name not in ("__new__", "__enter__", "__exit__")
    }

    own = {"__init__": _keep_log_dir, "get_logdir": lambda self: self.log_dir}
    return type(writer.__name__, (writer,), {**methods, **own})


def _keep_log_dir(self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
    """Store `log_dir` as an attribute, and write nothing."""
    self.log_dir = "runs" if log_dir is None else str(log_dir)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write nothing."""
