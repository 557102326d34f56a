"""Which queue a command speaks to."""

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
    """The queue of that kind.

    Args:
        backend: one of `BACKENDS`; HEADWATER_QUEUE, or else the embedded one, where absent.
        folder: of the embedded queue; found where absent.

    Raises:
        ConfigError: if there is no such backend.
        QueueError: if the queue cannot be used.
    """
    backend = backend or os.environ.get(ENVIRONMENT) or BACKENDS[0]
    if backend not in BACKENDS:
        raise ConfigError(f"{backend!r} is no queue", remedy=f"write one of {', '.join(BACKENDS)}")
    if backend == "slurm":
        return SlurmQueue()
    found = find_folder(folder)
    if found.exists and not found.owned:
        if not found.shared or found.path.stat().st_uid != 0:
            raise found.not_ours()  # who keeps a queue sees the environment of its jobs: root alone may
        return SharedQueue(found)
    prepare(found)
    return EmbeddedQueue(Database(found), Caller.myself(), lambda: ensure_supervisor(found))


def prepare(
    folder: QueueFolder, *, num_csx: int | None = None, grace_s: float | None = None, shared: bool = False
) -> None:
    """See that there is a queue, with what is given in place of what it was before.

    Args:
        folder: where.
        num_csx: CSXs of this machine; each GPU, or else each core, is one where absent.
        grace_s: seconds from the request to end a job to its end.
        shared: other users may ask.
    """
    folder.create(shared=shared)
    if not folder.database.exists():
        create_database(folder, find_slots(num_csx), _GRACE_S if grace_s is None else grace_s)
    if num_csx is not None or grace_s is not None:
        database = Database(folder)
        with database.transaction():
            database.change_settings(find_slots(num_csx) if num_csx else None, grace_s)
        database.close()
