"""The settings of an engine that a plan does not contain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from headwater.core.stage import ParamSpec
from headwater.store.kept import FirstMask

Initial = Callable[[ParamSpec], torch.Tensor]
"""Function that returns the initial value of a parameter."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The settings of an engine beside its model, its plan and its optimizer.

    Attributes:
        verify_disk: compare data that is read from the disk tier with the checksums of the written data.
        first_mask: chooses the first masks of parameters with `ParamSpec.kept`; needed if the plan has some.
        folder_of_copies: folder of files for large copies of weights and of optimizer state, which
            `torch.save` makes, for example; `None` if such copies are in memory.
    """

    verify_disk: bool = False
    first_mask: FirstMask | None = None
    folder_of_copies: Path | None = None


DEFAULTS = EngineOptions()
