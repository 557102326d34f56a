"""Precision of a run: dtypes of weights and computation, and the scale of the loss."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from headwater.core.errors import ConfigError
from headwater.core.warn_once import warn_once

logger = logging.getLogger(__name__)

PrecisionName = Literal["fp32", "bf16", "fp16"]

_WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Precision of a run. Masters are always fp32; norms, softmax and loss are computed in fp32.

    Attributes:
        name: `fp32`, `bf16` or `fp16`: the dtype in which weights are sent and matrix products are computed.
        loss_scale: factor on the loss before backward: a number, or `"dynamic"` (fp16).
    """

    name: PrecisionName = "fp32"
    loss_scale: float | Literal["dynamic"] = 1.0

    def __post_init__(self) -> None:
        if self.name not in _WIRE:
            raise ConfigError(
                f"expected a known precision, got {self.name!r}", remedy="write fp32, bf16 or fp16"
            )

    @property
    def wire_dtype(self) -> torch.dtype:
        return _WIRE[self.name]

    @property
    def mixed(self) -> bool:
        """True if the wire image has a narrower dtype than the masters: bf16 or fp16."""
        return self.name != "fp32"


def usable_precision(precision: Precision, device: str) -> Precision:
    """Return `precision`, or fp32 with a warning if it is bf16 and the GPU has no products in bf16.

    Args:
        precision: the precision that the user has chosen.
        device: `cpu` or `cuda`.
    """
    if device == "cpu" or precision.name != "bf16":
        return precision
    # Without CUDA this is a plan for other GPUs than this machine has, for example a simulated cluster's.
    if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return precision
    warn_once(
        logger,
        "%s cannot compute in bf16: this run computes in fp32, which takes twice the memory for weights and "
        "activations; for 16 bits write fp16_type: float16",
        torch.cuda.get_device_name(),
    )
    return Precision("fp32")


@contextmanager
def autocast(precision: Precision, device: str) -> Iterator[None]:
    """Return the autocast context for a forward. It does nothing if the precision is fp32."""
    if not precision.mixed:
        yield
        return
    with torch.autocast(device, dtype=precision.wire_dtype):
        yield
