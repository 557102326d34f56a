"""Translation of torch's errors about a GPU into errors of this package."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headwater.core.device_memory import is_out_of_memory
from headwater.core.errors import HeadwaterError, StreamError
from headwater.core.units import format_bytes
from headwater.store.update import NOT_APPLIED

_WITHOUT_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def device_errors() -> Iterator[None]:
    """Enter a context in which errors of a GPU are raised as `StreamError`, with a remedy.

    Raises:
        StreamError: if the GPU has no memory left, if its driver fails, or if an operator has no
            deterministic kernel.
    """
    try:
        yield
    except RuntimeError as error:
        found = translated(error)
        if found is None:
            raise
        raise found from error


def translated(error: RuntimeError) -> HeadwaterError | None:
    """Return the error of this package for an error of torch; `None` if the error is not about a GPU."""
    text = str(error)
    if is_out_of_memory(error):
        return StreamError(
            f"the GPU has no memory left for this step: {_first_line(text)}{_free_text()}",
            remedy="end other processes that use the GPU, or write a smaller device_memory or "
            f"micro_batch_size{NOT_APPLIED}",
        )
    operator = _WITHOUT_KERNEL.match(text)
    if operator is not None:
        return StreamError(
            f"the operator {operator[1]} has no deterministic kernel on a GPU",
            remedy="write matmul: fast, which allows other kernels, or replace the operator in the model",
        )
    if _WORKSPACE in text:
        return StreamError(
            "matrix products on this GPU are not deterministic with the present workspaces of cuBLAS",
            where=f"the environment variable {_WORKSPACE}",
            remedy=f"set {_WORKSPACE}=:4096:8 before the run, or write matmul: fast",
        )
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text:
        return StreamError(
            f"the GPU or its driver has failed: {_first_line(text)}",
            remedy=f"end this process and resume from the last checkpoint{NOT_APPLIED}",
        )
    return None


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "no reason was given"


def _free_text() -> str:
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # the driver may not answer after a failure
            free, total = torch.cuda.mem_get_info()
            return f" ({format_bytes(free)} of {format_bytes(total)} are free)"
    return ""
