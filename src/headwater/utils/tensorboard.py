"""Torch's own writer for TensorBoard, imported when it is asked for; it takes the tensors of closures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError

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
    return SummaryWriter
