"""Runs of `StreamedTrainer` that are killed while they save, and runs that resume after them.

Called with a folder. Prints the outcome of each run as JSON. Runs are forks of this process, which has
imported everything and started no thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trainers import trainer_of
from transformers.trainer_utils import get_last_checkpoint

import headwater

NUM_KILLS = 4
OPTIONS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the first checkpoint stays the best
    "save_total_limit": 2,
}
_OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


def count_operations(kill_at: int | None) -> Callable[[], int]:
    """Count operations on files of this process, and kill it at the one with this number.

    A file of `torch.save` is half written then. Other operations do not happen.
    """
    counted = 0

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted == kill_at:
                if operation is save:
                    save(*args, **kwargs)
                    os.truncate(args[1], Path(args[1]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return wrapper

    save = torch.save
    torch.save = counting(save)
    for name in _OPERATIONS:
        setattr(os, name, counting(getattr(os, name)))
    return lambda: counted


def train(folder: Path, *, resume: bool) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one; return what the run has seen."""
    trainer = trainer_of(headwater.backend("CSX", tier="memory", num_slabs=2), folder, **OPTIONS)
    trainer.train(resume_from_checkpoint=resume and get_last_checkpoint(folder) is not None)
    bits = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        bits.update(value.numpy().tobytes())
    best = trainer.state.best_model_checkpoint
    return {"weights": bits.hexdigest(), "best": Path(best).name, "best_is_there": Path(best).is_dir()}


def fork(folder: Path, *, resume: bool = False, kill_at: int | None = None) -> int:
    """Train in a forked process; return its exit status."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    os.dup2(2, 1)  # logs of the Trainer must not mix with the outcome
    try:
        counted = count_operations(kill_at)
        seen = train(folder, resume=resume) | {"operations": counted()}
        folder.with_name(folder.name + ".json").write_text(json.dumps(seen))
        status = 0
    except Exception:  # noqa: BLE001 - printed, and the exit status tells the test of the failure
        traceback.print_exc()
    finally:
        os._exit(status)


def seen_by(folder: Path) -> dict[str, Any]:
    path = folder.with_name(folder.name + ".json")
    seen: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return seen


def files_by_checkpoint(folder: Path) -> dict[str, list[str]]:
    return {
        path.name: sorted(file.name for file in path.iterdir())
        for path in sorted(folder.glob("checkpoint-*"))
    }


def main(root: Path) -> None:
    # The first backward starts a thread for each GPU, and forks of a process with such threads compute no
    # gradients.
    torch.ones((), requires_grad=True).backward()
    assert fork(root / "undisturbed") == 0
    undisturbed = seen_by(root / "undisturbed")
    num_operations = undisturbed.pop("operations")
    outcomes = []
    for instant in sorted(random.Random(0).sample(range(1, num_operations + 1), NUM_KILLS)):
        folder = root / f"killed_at_{instant}"
        killed = fork(folder, kill_at=instant)
        left = files_by_checkpoint(folder)
        resumed = fork(folder, resume=True)
        seen = seen_by(folder)
        seen.pop("operations", None)
        outcomes.append({
            "instant": instant,
            "killed": killed,
            "left": left,
            "resumed": resumed,
            "same": seen == undisturbed,
            "left_at_end": sorted(path.name for path in folder.iterdir()),
        })  # fmt: skip
    print(json.dumps({"undisturbed": files_by_checkpoint(root / "undisturbed"), "outcomes": outcomes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
