"""Dry runs that all commands of a session of tests share.

A command that plans a tiny model needs 2 s of a slow core, and its dry runs take three quarters of that. Most
tests of commands train the same tiny model, each in several processes. The trace of a model of a params file
depends only on its params, the precision, the device, the loss and the shapes of the batch. So the first
command makes a dry run, and other commands with the same ones read its trace from a file.

Dry runs of user models, of their loss functions, and of the training of library models are not shared.
HEADWATER_ALL_DRY_RUNS=1 makes every command repeat its dry runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
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
    model, config = trainable.model, getattr(init, "model", None)  # a user's model is not in the params
    settings = _settings(model, config, inference=options.get("inference", False))
    loss = _loss(trainable.loss)
    if settings is None or loss is None:
        return None
    parts = (
        settings,
        loss,
        (init.backend.loss, init.backend.attention, init.backend.matmul),
        init.precision.precision,
        repr(trainable.example(1)),  # shapes and dtypes, since it has no values
        [(name, type(part).__qualname__, part.training) for name, part in model.named_modules()],
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()],
        sorted(options.items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _settings(model: Any, config: Any, *, inference: bool) -> Any:
    """Return what decides the forward of a model of Headwater, or of a library model in inference."""
    from headwater.models.registry import FAMILIES

    if getattr(config, "name", "") not in FAMILIES or not type(model).__module__.startswith("headwater."):
        return None
    if config.name != "hf":
        return repr(config)
    if not inference:
        return None
    library = {**model.hf.config.to_dict(), "_name_or_path": ""}  # in any folder
    attention = model.hf.config._attn_implementation
    return repr(config.model_copy(update={"hf": ""})), repr(sorted(library.items())), attention


def _loss(loss: Any) -> Any:
    """Return a name and the settings of a loss function of Headwater; None for another one."""
    if isinstance(loss, functools.partial):
        name = _loss(loss.func)
        return None if name is None or loss.args else (name, sorted(loss.keywords.items()))
    if not inspect.isfunction(loss) or not loss.__module__.startswith("headwater."):
        return None
    values = tuple(cell.cell_contents for cell in loss.__closure__ or ())
    return (loss.__module__, loss.__qualname__, values) if all(type(v) is int for v in values) else None


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
