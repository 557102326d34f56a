"""MLIR of a captured graph, if torch-mlir is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch.export import ExportedProgram

MISSING = "torch-mlir is not installed: no MLIR is written"

Lowering = Callable[[ExportedProgram, str], str]
"""Returns the MLIR text of a program, in the torch dialect, as a function with a given name."""


def find_lowering() -> Lowering | None:
    """Return a function that lowers programs to MLIR; `None` if torch-mlir is not installed."""
    try:
        fx = import_module("torch_mlir.fx")
    except ImportError:
        return None

    def lower(program: ExportedProgram, name: str) -> str:
        return str(fx.export_and_import(program, func_name=name))

    return lower
