"""Precision of a run: dtypes of weights and computation, and the scale of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from headwater.core.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16"]

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Precision of a run. Masters are always fp32; norms, softmax and loss are computed in fp32.

    Attributes:
        name: `fp32`, `bf16` or `fp16`: the dtype in which weights travel and matrix products run.
        loss_scale: factor on the loss before backward: a number, or `"dynamic"` (fp16).
    """

    name: PrecisionName = "fp32"
    loss_scale: float | Literal["dynamic"] = 1.0

    def __post_init__(self) -> None:
        if self.name not in _WIRE:
            raise ConfigError(f"unknown precision {self.name!r}", remedy="write fp32, bf16 or fp16")

    @property
    def wire_dtype(self) -> torch.dtype:
        return _WIRE[self.name]

    @property
    def mixed(self) -> bool:
        """True if the wire image has a narrower dtype than the masters: bf16 or fp16."""
        return self.name != "fp32"


@contextmanager
def autocast(precision: Precision, device: str) -> Iterator[None]:
    """Return the autocast context for a forward. It does nothing if the precision is fp32."""
    if not precision.mixed:
        yield
        return
    with torch.autocast(device, dtype=precision.wire_dtype):
        yield
