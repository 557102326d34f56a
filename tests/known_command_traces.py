"""Dry runs that all commands of a session of tests share.

A command that plans a tiny model needs 2 s of a slow core, and its dry runs take three quarters of that. Most
tests of commands train the same tiny model, each in several processes. The trace of a model of a params file
depends only on its params, the precision, the device, the loss and the shapes of the batch. So the first
command makes a dry run, and other commands with the same ones read its trace from a file.

Dry runs of user models, library models and other loss functions are not shared.
HEADWATER_ALL_DRY_RUNS=1 makes every command repeat its dry runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "HEADWATER_TEST_TRACES"
"""Environment variable: quickly started processes share the traces in this folder."""

_USERS = frozenset(
    {"appliance", "board", "cli", "docs", "evaluation", "run", "scaling", "serving", "trainer"}
)
"""Folders of the tests that share traces: those of commands, which test no dry runs."""


def are_shared(test: Path) -> bool:
    """True if the commands of this file of tests share traces."""
    return test.parent.name in _USERS and not os.environ.get("HEADWATER_ALL_DRY_RUNS")


def share_traces(folder: Path, set_attribute: Callable[..., None] = setattr) -> None:
    """Make the dry runs of this process use the traces in a folder, if it has imported the planner."""
    planning = sys.modules.get("headwater.trainer.planning")
    if planning is None:
        return
    original = planning.dry_runs

    def dry_runs(init: Any, trainable: Any, **options: Any) -> Callable[[int], object]:
        make = original(init, trainable, **options)
        key = _key(init, trainable, options)
        if key is None:
            return make
        return functools.cache(lambda size: _known_or_made(folder / f"{key}-{size}", lambda: make(size)))

    for name in ("planning", "simulation"):
        module = sys.modules.get(f"headwater.trainer.{name}")
        if module is not None:
            set_attribute(module, "dry_runs", dry_runs)


def _key(init: Any, trainable: Any, options: dict[str, Any]) -> str | None:
    """Return a name for what a trace depends on besides the batch size; None if it is not known."""
    from headwater.core.loss_function import call_model
    from headwater.models.registry import FAMILIES

    model, config = trainable.model, getattr(init, "model", None)  # a user's model is not in the params
    family = FAMILIES.get(getattr(config, "name", ""))
    is_ours = family is not None and type(model) is family.model and config.name != "hf"
    if not is_ours or trainable.loss is not call_model:
        return None
    parts = (
        repr(config),
        (init.backend.loss, init.backend.attention, init.backend.matmul),
        init.precision.precision,
        repr(trainable.example(1)),  # shapes and dtypes, since it has no values
        [(name, type(part).__qualname__, part.training) for name, part in model.named_modules()],
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()],
        sorted(options.items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _known_or_made(file: Path, make: Callable[[], object]) -> object:
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads(file.read_bytes())
    trace = make()
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{os.getpid()}-{file.name}"
    own.write_bytes(pickle.dumps(trace))
    own.replace(file)  # at once, since other processes read it
    return trace
