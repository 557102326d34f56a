"""An input worker: a process that reads samples and sends batches to ranks, also on other hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import platform
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, final

import safetensors.torch
import torch

from headwater.core.errors import DataError, HeadwaterError, RankError
from headwater.data.source import Samples
from headwater.fabric.connection import Connection
from headwater.fabric.handshake import StrangerError, examine, purpose_digest

logger = logging.getLogger(__name__)

BATCH, FACTS, PROBLEM = b"b", b"f", b"p"
"""First byte of a reply, which says what follows: a batch, facts of the data in JSON, or an error in JSON."""
NUMBER = 0
"""Number of every input worker in the handshake, and of every rank that connects to one."""
_HANDSHAKE_S = 10.0
_IDLE_S = 7 * 86400.0
_CLOSED = {errno.EBADF, errno.EINVAL}
_PAUSE_S = 0.05
_CHECK_FILES = "check the disk and the files of the data on that host"
_MAX_UNAUTHENTICATED = 64
"""Largest number of connections that are authenticated at a time."""


@final
class InputWorker:
    """Answers requests for batches. Each connection has a thread, and sends one batch for each request.

    Args:
        data: purpose -> data set. Ranks name the purpose when they connect.
        listener: a listening socket; closed by `close`.
        secret: shared with the ranks.
    """

    def __init__(self, data: Mapping[str, Samples], listener: socket.socket, secret: bytes) -> None:
        self._data = {purpose_digest(purpose): samples for purpose, samples in data.items()}
        self._listener = listener
        self._secret = secret
        self._strangers = threading.BoundedSemaphore(_MAX_UNAUTHENTICATED)
        self._threads: dict[threading.Thread, socket.socket] = {}

    def serve(self) -> None:
        """Serve connections until `close`. Then end all connections, and wait for reads that are running.

        If the process ended during a read, the thread would keep h5py's lock, and Python waits for this lock
        while it ends.
        """
        self._accept()
        for connection in self._threads.values():
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        """Start a thread for each connection, until `close`."""
        while True:
            try:
                connection, place = self._listener.accept()
            except ConnectionError:
                continue  # the rank has disconnected
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in _CLOSED:
                    return
                time.sleep(_PAUSE_S)  # for example, this process has too many open files at the moment
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()  # a rank will try to connect again
                continue
            self._threads = {thread: own for thread, own in self._threads.items() if thread.is_alive()}
            thread = threading.Thread(target=self._serve, args=(connection, place), daemon=True)
            self._threads[thread] = connection
            thread.start()

    def close(self) -> None:
        """Make `serve` end. A handler of signals may call this."""
        with contextlib.suppress(OSError):
            # This ends `accept`; `close` alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket, place: Any) -> None:
        try:
            keys, _, purpose = examine(connection, self._secret, NUMBER, _HANDSHAKE_S)
        except (StrangerError, OSError) as error:
            logger.warning("refused a connection from %s: %s", place[0], error)
            connection.close()
            return
        finally:
            self._strangers.release()
        samples = self._data.get(purpose)
        with contextlib.closing(Connection(connection, keys, NUMBER, _IDLE_S)) as found:
            try:
                while True:
                    found.send_message(reply_to(samples, bytes(found.receive_message()))).result()
            except OSError:
                pass  # the rank has disconnected, or was restarted
            except RankError as error:
                logger.warning("closed the connection from %s: %s", place[0], error)


def reply_to(samples: Samples | None, request: bytes) -> bytes:
    """Return the reply to a request. An error of reading is a reply too.

    Args:
        samples: the data set that the rank named; `None` if this worker does not have it.
        request: draws as a list in JSON, or null for the facts of the data set.
    """
    try:
        return _answer(samples, json.loads(request))
    except HeadwaterError as error:
        return problem(error)
    except OSError as error:
        what = f"the data cannot be read: {error.strerror or error}"
        return problem(DataError(what, where=error.filename and str(error.filename), remedy=_CHECK_FILES))


def _answer(samples: Samples | None, draws: list[int] | None) -> bytes:
    if samples is None:
        remedy = "start the worker with the params of the run, and with the same options"
        raise DataError("the input worker was started for other data", remedy=remedy)
    if draws is None:
        facts = {"num_samples": len(samples), "sequence_length": samples.sequence_length}
        return FACTS + json.dumps(facts).encode()
    batch = samples.__getitems__(draws)
    if isinstance(batch, DataError):
        raise batch
    return BATCH + pack(batch)


def pack(batch: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a batch."""
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in batch.items()})


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    """Return the batch that `pack` has packed."""
    return safetensors.torch.load(data)


def problem(error: HeadwaterError) -> bytes:
    """Return the reply that reports an error and names this host."""
    where = f"{f'{error.where}, ' if error.where else ''}input worker on {platform.node()}"
    return PROBLEM + json.dumps({"what": error.what, "where": where, "remedy": error.remedy}).encode()
