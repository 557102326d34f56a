"""Save two checkpoints of a store with large parameters; be killed within the second one.

Called with a folder and a number: the process is killed before this write of the threads that write behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from checkpoint_runs import LARGE, make_store, train

from headwater.trainer.checkpoint import CheckpointManager


def main(folder: Path, kill_at: int) -> None:
    store = make_store(shapes=LARGE)
    manager = CheckpointManager(folder, keep_n=1)
    train(store, 0)
    manager.save(store, 1, {})
    manager.wait()
    system, lock, counted = os.pwrite, threading.Lock(), 0

    def pwrite(*args: object) -> int:
        nonlocal counted
        with lock:
            counted += threading.current_thread().name.startswith("headwater-file")
            if counted == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return system(*args)  # type: ignore[arg-type]

    os.pwrite = pwrite
    train(store, 1)
    manager.save(store, 2, {})
    train(store, 2)
    manager.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
