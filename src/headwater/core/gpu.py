"""The reasons why torch cannot use a GPU, as errors and warnings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headwater.core.errors import PlanError

_DRIVER = Path("/dev/nvidiactl")
"""Exists on Linux if a driver of NVIDIA is loaded."""

_HIDDEN = ("", "-1")
"""Values of `CUDA_VISIBLE_DEVICES` by which a user hides all GPUs."""


def why_missing() -> str:
    """Return the reason why `torch.cuda.is_available()` is false."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # an assertion: torch was built for CPUs
        # The rest of torch's texts is advice about its own packages, except for CUDA's error at the end.
        text = _first_line(error)
        reason, cuda = text.partition(". ")[0].rstrip("."), re.search(r"Error \d+: .*", text)
        return reason if cuda is None else f"{reason}: {cuda[0].rstrip('.')}"
    return "no reason is known"


def why_unused() -> str | None:
    """Return why torch cannot use an NVIDIA GPU of this machine; `None` without one, or if it is hidden."""
    if torch.cuda.is_available() or not _DRIVER.exists():
        return None
    return None if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN else why_missing()


@contextmanager
def first_use() -> Iterator[None]:
    """Enter a context that may be the first of this process to use the GPU.

    Raises:
        PlanError: if the driver refuses this process.
    """
    try:
        yield
    except RuntimeError as error:
        raise PlanError(
            f"the GPU cannot be used: {_first_line(error)}",
            where="device",
            remedy="run nvidia-smi; end other processes that use the GPU, restart the machine if its driver "
            "does not answer, or use the backend type CPU",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
