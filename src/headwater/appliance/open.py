"""Selection and setup of the queue that a command uses."""

from __future__ import annotations

import os
from pathlib import Path

from headwater.appliance.client import SharedQueue
from headwater.appliance.database import Database, create_database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder, find_folder
from headwater.appliance.machine import find_slots
from headwater.appliance.queue import Queue
from headwater.appliance.slurm import SlurmQueue
from headwater.appliance.supervisor import ensure_supervisor
from headwater.core.errors import ConfigError

ENVIRONMENT = "HEADWATER_QUEUE"
BACKENDS = ("embedded", "slurm")
_GRACE_S = 120.0


def open_queue(backend: str | None = None, folder: Path | None = None) -> Queue:
    """Return the queue to use.

    Args:
        backend: one of `BACKENDS`; if `None`, the value of HEADWATER_QUEUE, or else `embedded`.
        folder: folder of the embedded queue; see `find_folder` for `None`.

    Raises:
        ConfigError: if the backend is unknown.
        QueueError: if the queue cannot be used.
    """
    where = "--queue" if backend else ENVIRONMENT
    backend = backend or os.environ.get(ENVIRONMENT) or BACKENDS[0]
    if backend not in BACKENDS:
        raise ConfigError(
            f"unknown queue {backend!r}", where=where, remedy=f"write one of {', '.join(BACKENDS)}"
        )
    if backend == "slurm":
        return SlurmQueue()
    found = find_folder(folder)
    if found.exists and not found.owned:
        if not found.shared or found.path.stat().st_uid != 0:
            # The owner of a queue can read the environment of its jobs, so only root's queue is used.
            raise found.not_ours()
        return SharedQueue(found)
    prepare(found)
    return EmbeddedQueue(Database(found), Caller.myself(), lambda: ensure_supervisor(found))


def prepare(
    folder: QueueFolder, *, num_csx: int | None = None, grace_s: float | None = None, shared: bool = False
) -> None:
    """Create the queue if it does not exist, and change the settings that are given.

    Args:
        folder: the queue's folder.
        num_csx: number of CSXs of this machine. `None` keeps the setting; a new queue then has one CSX for
            each GPU, or for each core without a GPU.
        grace_s: seconds from the request to end a job until it is killed. `None` keeps the setting.
        shared: true to accept requests of other users.
    """
    folder.create(shared=shared)
    if not folder.database.exists():
        create_database(folder, find_slots(num_csx), _GRACE_S if grace_s is None else grace_s)
    if num_csx is not None or grace_s is not None:
        database = Database(folder)
        with database.transaction():
            database.change_settings(find_slots(num_csx) if num_csx else None, grace_s)
        database.close()
