"""Run trainings that kill themselves at a file operation and resume in another process.

Called with a folder and a tier: `disk`, or `disk in backward` for updates in backward. Prints the outcome of
each run as JSON. Runs are forks of this process, which has imported everything and started no thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint_runs import load_checkpoint
from torch import nn

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import Trace, trace_step
from headwater.plan.types import Activations, Plan, Updates
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.trainer.callback import FitStart, StepEnd
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.history import History
from headwater.trainer.model_dir_lock import ModelDirLock

NUM_STEPS = 6
NUM_KILLS = 10
HISTORY_WRITTEN = "replace"
"""The instant at which a whole new history is on disk and does not have its name yet."""
_OPERATIONS = ("open", "pwrite", "posix_fallocate", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 1))


def loss_function(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batch_of(step: int) -> torch.Tensor:
    return torch.rand(4, 16, generator=torch.Generator().manual_seed(step))


def train(model_dir: Path, model: nn.Module, plan: Plan) -> None:
    """Train from the last checkpoint to the last step; write a checkpoint and history after each step."""
    history = History(model_dir / "history.jsonl")
    checkpoints = CheckpointManager(model_dir, keep_n=2)
    optimizer = OptimizerSpec("AdamW", {"lr": 0.1})
    max_norm = 0.5 if plan.updates == "on_fetch" else None
    with (
        ModelDirLock(model_dir),
        Engine(model, plan, optimizer, seed=1, loss_function=loss_function) as engine,
    ):
        latest = checkpoints.latest()
        step, state = load_checkpoint(engine.store, latest) if latest else (0, {"losses": []})
        history.on_fit_start(FitStart(step, NUM_STEPS, plan))
        while step < NUM_STEPS:
            loss = engine.train_step([batch_of(step)], Update(step, {"lr": 0.1}, max_norm=max_norm)).loss
            step, state = step + 1, {"losses": [*state["losses"], loss]}
            history.on_step_end(StepEnd(step, loss, 0.1, 1.0, True, 1.0, 0, 1.0, 0, 0, 0.0, 0.0))
            path = checkpoints.save(engine.store, step, state)
            history.on_checkpoint(step, path)
        history.on_fit_end()
        checkpoints.wait()


def count_operations(kill_at: int | str | None) -> Callable[[], int]:
    """Count the file operations of this process; kill it before the operation with this number or name."""
    counted = 0

    def counting(operation: Callable[..., object]) -> Callable[..., object]:
        name = operation.__name__

        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal counted
            counted += 1
            if kill_at in (counted, name):
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return wrapper

    for name in _OPERATIONS:
        setattr(os, name, counting(getattr(os, name)))
    return lambda: counted


def fork(model_dir: Path, tier: str, trace: Trace, kill_at: int | str | None = None) -> int:
    """Run `train` in a forked process; return its exit status."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        activations = (Activations.KEEP,) * len(trace.stages)
        disk = model_dir.with_name(model_dir.name + "_tier")
        tier, _, in_backward = tier.partition(" ")
        updates: Updates = "in_backward" if in_backward else "on_fetch"
        plan = Plan(
            trace, Precision("bf16"), "cpu", tier, False, 2, activations, 4, 1, "memory", disk=disk,  # type: ignore[arg-type]
            updates=updates,
        )  # fmt: skip
        counted = count_operations(kill_at)
        train(model_dir, make_model(), plan)
        model_dir.with_name(model_dir.name + ".count").write_text(str(counted()))
        status = 0
    finally:
        os._exit(status)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main(root: Path, tier: str) -> None:
    # The first backward starts a thread for each GPU, and forks of a process with such threads compute no
    # gradients. During a dry run, CUDA builds of torch count GPUs even on a machine without them.
    torch.ones((), requires_grad=True).backward()
    trace = trace_step(make_model(), batch_of(0), Precision("bf16"), loss_function=loss_function)
    assert fork(root / "undisturbed", tier, trace) == 0
    undisturbed = files_in(root / "undisturbed" / f"checkpoint_{NUM_STEPS}")
    num_operations = int((root / "undisturbed.count").read_text())
    history = (root / "undisturbed" / "history.jsonl").read_text()
    outcomes = []
    instants = sorted(random.Random(tier).sample(range(1, num_operations + 1), NUM_KILLS))
    for instant in [*instants, HISTORY_WRITTEN]:
        model_dir = root / f"killed_at_{instant}"
        killed = fork(model_dir, tier, trace, kill_at=instant)
        left_at_once = sorted(path.name for path in model_dir.iterdir())
        resumed_from = [path.name for path in complete_checkpoints(model_dir)]
        resumed = fork(model_dir, tier, trace)
        outcomes.append({
            "instant": instant,
            "killed": killed,
            "left_at_once": left_at_once,
            "resumed_from": resumed_from,
            "resumed": resumed,
            "same": files_in(model_dir / f"checkpoint_{NUM_STEPS}") == undisturbed,
            "history": (model_dir / "history.jsonl").read_text(),
            "undisturbed_history": history,
            "left": sorted(path.name for path in model_dir.iterdir()),
        })  # fmt: skip
    print(json.dumps(outcomes))


if __name__ == "__main__":
    warnings.simplefilter("error")  # not by the option -W, with which a process has no quick start
    main(Path(sys.argv[1]), sys.argv[2])
