"""Headwater: train PyTorch models of any size on the hardware you have, by weight streaming.

Names are imported when they are first used, so that `import headwater` costs nothing.
"""

from __future__ import annotations

import importlib
import os
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headwater.core.spins import spin_shortly
from headwater.core.version import __version__

spin_shortly()

if "HEADWATER_SCRIPT" in os.environ:
    importlib.import_module("headwater.fabric.launch.script").begin()

_MODULE_OF_NAME = {
    "backend": "headwater.api.backend",
    "current_backend": "headwater.api.backend",
    "compile": "headwater.api.compile",
    "release": "headwater.api.compile",
    "cross_entropy": "headwater.models.cross_entropy",
    "trace": "headwater.api.step",
    "compile_step": "headwater.api.step",
    "step_closure": "headwater.api.step",
    "checkpoint_closure": "headwater.api.step",
    "save": "headwater.api.files",
    "load": "headwater.api.files",
    "empty_parameters": "headwater.core.empty",
    "profile": "headwater.api.profile",
    "load_pretrained": "headwater.api.pretrained",
    "save_pretrained": "headwater.api.pretrained",
    "compile_only": "headwater.api.without_training",
    "validate_only": "headwater.api.without_training",
}
_MODULES = {
    "amp": "headwater.api.amp",
    "distributed": "headwater.distributed",
    "experimental": "headwater.experimental",
    "framework": "headwater.framework",
    "integrations": "headwater.integrations",
    "metrics": "headwater.metrics",
    "optim": "headwater.optim",
    "sparse": "headwater.api.sparse",
    "utils": "headwater.utils",
}

__all__ = [
    "__version__",
    "amp",
    "backend",
    "checkpoint_closure",
    "compile",
    "compile_only",
    "compile_step",
    "cross_entropy",
    "current_backend",
    "distributed",
    "empty_parameters",
    "experimental",
    "framework",
    "integrations",
    "load",
    "load_pretrained",
    "metrics",
    "optim",
    "profile",
    "release",
    "save",
    "save_pretrained",
    "sparse",
    "step_closure",
    "trace",
    "utils",
    "validate_only",
]

if TYPE_CHECKING:
    from headwater import distributed, experimental, framework, integrations, metrics, optim, utils
    from headwater.api import amp, sparse
    from headwater.api.backend import backend, current_backend
    from headwater.api.compile import compile, release
    from headwater.api.files import load, save
    from headwater.api.pretrained import load_pretrained, save_pretrained
    from headwater.api.profile import profile
    from headwater.api.step import checkpoint_closure, compile_step, step_closure, trace
    from headwater.api.without_training import compile_only, validate_only
    from headwater.core.empty import empty_parameters
    from headwater.models.cross_entropy import cross_entropy


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF_NAME:
        return getattr(_import(_MODULE_OF_NAME[name]), name)
    if name in _MODULES:
        return _import(_MODULES[name])
    raise AttributeError(f"module 'headwater' has no attribute {name!r}")


def _import(name: str) -> ModuleType:
    """Import a module, and leave Python's random generator as it was: some imports draw numbers from it."""
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted(__all__)
