"""A data set that input workers read, on this host or on others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from headwater.core.errors import DataError
from headwater.data.input_worker import NUMBER, PROBLEM, unpack
from headwater.data.loader import Batch
from headwater.fabric.connection import Connection
from headwater.fabric.switchboard import call

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

Address = tuple[str, int]


@final
class InputWorkers:
    """The input workers of one data set.

    A batch depends only on its draws. So if a worker is lost, the same draws are requested again, from
    another worker or from the same one after its restart, and the batches are equal to the bit.

    Args:
        addresses: host and port of each worker.
        purpose: names the data set; see `InputWorker`.
        secret: shared with the workers.
        patience_s: seconds without any worker after which a request fails.
    """

    def __init__(
        self, addresses: Sequence[Address], purpose: str, secret: bytes, patience_s: float = 600.0
    ) -> None:
        self.addresses = tuple(addresses)
        self.purpose = purpose
        self.secret = secret
        self.patience_s = patience_s
        self._is_closing = threading.Event()

    def close(self) -> None:
        """Make all requests that wait for a lost worker fail."""
        self._is_closing.set()

    def ask(self, connections: dict[Address, Connection], first: int, request: object) -> bytes:
        """Send a request to a worker and return its reply. Try the others in turn while it is lost.

        Args:
            connections: the open connections of this thread; changed.
            first: number of the worker that is tried first.
            request: a value that JSON can represent.

        Raises:
            DataError: if no worker has answered for `patience_s` seconds.
            RankError: if a worker has another secret.
        """
        data, pause_s = json.dumps(request).encode(), _FIRST_PAUSE_S
        end, attempt = time.monotonic() + self.patience_s, first
        while True:
            address = self.addresses[attempt % len(self.addresses)]
            try:
                if address not in connections:
                    connections[address] = call(
                        address, self.secret, self.purpose, NUMBER, NUMBER, _TIMEOUT_S
                    )
                connections[address].send_message(data).result()
                return bytes(connections[address].receive_message())
            except OSError as error:
                lost = connections.pop(address, None)
                if lost is not None:
                    lost.close()
                if self._is_closing.is_set() or time.monotonic() > end:
                    raise self._unreachable(error) from error
                logger.info("input worker %s:%d: %s; trying again", *address, error)
            attempt += 1
            # All workers were tried once. One of them is probably being restarted, so wait.
            if (attempt - first) % len(self.addresses) == 0:
                self._is_closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _unreachable(self, error: Exception) -> DataError:
        places = ", ".join(f"{host}:{port}" for host, port in self.addresses)
        return DataError(
            f"no input worker has answered for {self.patience_s:.0f} s: {error}",
            where=f"input_workers: {places}",
            remedy="start one there: headwater input_worker PARAMS --listen HOST:PORT",
        )


@final
class RemoteSamples:
    """The data set of input workers.

    Args:
        workers: the input workers.
        count: number of workers to use at once, the first ones; the others replace lost ones.

    Raises:
        DataError: if no worker answers, or the workers were started for other data.
    """

    def __init__(self, workers: InputWorkers, count: int) -> None:
        self.workers = workers
        self._count = count
        self._facts = json.loads(_content(self._ask_once(None)))

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample; `None` if samples are not made of tokens."""
        length: int | None = self._facts["sequence_length"]
        return length

    def __len__(self) -> int:
        return int(self._facts["num_samples"])

    def __getitems__(self, draws: Sequence[int], /) -> Batch | DataError:
        """Return the batch of these draws, or an error."""
        return _batch(self._ask_once([int(draw) for draw in draws]))

    def read_ahead(self, batches: Iterable[Sequence[int]], per_worker: int) -> Iterator[Batch | DataError]:
        """Yield the batches of draws in order. A thread for each worker requests them ahead.

        Args:
            batches: the draws of each batch.
            per_worker: batches in memory or in flight for each worker. If the caller is slow, no more are
                requested, and the workers wait.
        """
        count = self._count
        reader = _Reader(self.workers)
        pool = ThreadPoolExecutor(count, thread_name_prefix="headwater-input")
        flying: deque[Future[Batch | DataError]] = deque()
        try:
            for number, draws in enumerate(batches):
                flying.append(pool.submit(reader.read, number % count, draws))
                if len(flying) >= count * per_worker:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            reader.close()

    def _ask_once(self, request: object) -> bytes:
        connections: dict[Address, Connection] = {}
        try:
            return self.workers.ask(connections, 0, request)
        finally:
            for connection in connections.values():
                connection.close()


@final
class _Reader:
    """Requests batches, with connections for each thread.

    Args:
        workers: the input workers.
    """

    def __init__(self, workers: InputWorkers) -> None:
        # This is a copy, because `close` must end the requests of this reader only.
        self._workers = InputWorkers(workers.addresses, workers.purpose, workers.secret, workers.patience_s)
        self._of_thread = threading.local()
        self._all: list[dict[Address, Connection]] = []

    def read(self, worker: int, draws: Sequence[int]) -> Batch | DataError:
        """Return a batch from `worker`, or from another worker if it does not answer."""
        if not hasattr(self._of_thread, "connections"):
            self._of_thread.connections = {}
            self._all.append(self._of_thread.connections)
        try:
            return _batch(self._workers.ask(self._of_thread.connections, worker, draws))
        except DataError as error:
            return error

    def close(self) -> None:
        """Close all connections; requests that are in flight fail."""
        self._workers.close()
        for connections in self._all:
            for connection in list(connections.values()):
                connection.close()


def _batch(reply: bytes) -> Batch | DataError:
    try:
        return unpack(_content(reply))
    except DataError as error:
        return error


def _content(reply: bytes) -> bytes:
    """Return a reply without its first byte.

    Raises:
        DataError: the error that the worker reports.
    """
    if reply[:1] == PROBLEM:
        raise DataError(**json.loads(reply[1:]))
    return reply[1:]
