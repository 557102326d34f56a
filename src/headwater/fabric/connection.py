"""A connection to one other rank that knows the secret. Messages are authenticated; bulk data is not."""

from __future__ import annotations

import contextlib
import hmac
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import final

from headwater.core.errors import RankError
from headwater.fabric.handshake import Keys

_LENGTH = struct.Struct("<Q")
_CODE_BYTES = 32
_MAX_MESSAGE_BYTES = 1 << 36
_SMALL_BYTES = 32 << 10
"""Bytes up to which the caller's thread sends data itself: they fit into the socket's buffer."""


@final
class Connection:
    """A connection to one other rank. Sends are done in the order of the calls, and so are receives.

    After a failed call the connection cannot be used: it is unknown how much the other end has received.

    Args:
        connection: its socket, after the handshake.
        keys: the keys that the handshake returned.
        peer: number of the other rank, for messages.
        timeout_s: seconds without progress after which a call fails.
    """

    def __init__(self, connection: socket.socket, keys: Keys, peer: int, timeout_s: float) -> None:
        self._socket = connection
        self._keys = keys
        self._peer = peer
        self._timeout_s = timeout_s
        self._num_sent = self._num_received = 0
        # A Python timeout would make the socket non-blocking; the system's timeouts below do not.
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            # The sender often waits for an answer, so the system must send a short message at once.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) + 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._out, self._in = _Lane(f"to rank {peer}"), _Lane(f"from rank {peer}")

    def send(self, data: memoryview) -> Future[None]:
        """Begin to send bytes. They must not change until the returned future is done."""
        # This thread sends only if no earlier send is running: bytes must leave in the order of the calls.
        if self._out.is_idle and len(data) <= _SMALL_BYTES:
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError as error:
                return _failed(self._lost(error))
        return self._out.submit(lambda: self._send(data)) if len(data) else _done()

    def receive(self, into: memoryview) -> Future[None]:
        """Begin to fill `into` with received bytes."""
        return self._in.submit(lambda: self._receive(into))

    def send_message(self, message: bytes) -> Future[None]:
        """Begin to send a message."""
        length = _LENGTH.pack(len(message))
        # The code covers the number of the message, so a repeated, lost or swapped message is noticed.
        code = _code(self._keys.sending, self._num_sent, length, message)
        self._num_sent += 1
        return self.send(memoryview(b"".join([length, code, message])))

    def receive_message(self) -> bytearray:
        """Return the next message of the other end. No other receive may be running.

        Raises:
            RankError: if the message was changed on its way.
        """
        header = bytearray(_LENGTH.size + _CODE_BYTES)
        self._receive(memoryview(header))
        length, code = header[: _LENGTH.size], header[_LENGTH.size :]
        (count,) = _LENGTH.unpack(length)
        # The code can be checked only when the whole message has arrived. This limits its memory until then.
        if count > _MAX_MESSAGE_BYTES:
            raise self._damaged()
        message = bytearray(count)
        self._receive(memoryview(message))
        if not hmac.compare_digest(code, _code(self._keys.receiving, self._num_received, length, message)):
            raise self._damaged()
        self._num_received += 1
        return message

    @property
    def own_address(self) -> str | None:
        """Network address of this end; `None` for a connection within the host."""
        return None if self._socket.family == socket.AF_UNIX else str(self._socket.getsockname()[0])

    def has_message(self) -> bool:
        """True if data has arrived, or the other end has closed the connection. Returns at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Close the connection, and end its threads. Calls that wait for the other end fail."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            # `shutdown` ends a send or receive that a thread is blocked in; `close` would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        # The threads end before the socket is closed. Otherwise a thread could still use the descriptor of
        # the socket when the system has given it to another file.
        self._out.close()
        self._in.close()
        self._socket.close()

    def _send(self, data: memoryview) -> None:
        try:
            while len(data):
                data = data[self._socket.send(data) :]
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, into: memoryview) -> None:
        try:
            while len(into):
                count = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
                # The other end has closed the connection, but more bytes were expected.
                if not count:
                    raise ConnectionResetError
                # A signal may end a receive before all bytes have arrived.
                into = into[count:]
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> OSError:
        if isinstance(error, BlockingIOError):  # SO_RCVTIMEO, SO_SNDTIMEO
            return TimeoutError(f"rank {self._peer} does not answer: timed out after {self._timeout_s:.0f} s")
        if isinstance(error, ConnectionError):
            return ConnectionError(f"rank {self._peer} has closed the connection")
        return OSError(f"the connection to rank {self._peer} is lost: {error.strerror or error}")

    def _damaged(self) -> RankError:
        return RankError(
            f"a message from rank {self._peer} is damaged: its length or its authentication code is wrong",
            remedy="find out who has access to the network between the hosts, and whether it damages data",
        )


def _code(key: bytes, number: int, length: bytes | bytearray, message: bytes | bytearray) -> bytes:
    code = hmac.new(key, _LENGTH.pack(number) + length, "sha256")
    code.update(message)
    return code.digest()


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _failed(error: OSError) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


@final
class _Lane:
    """Runs jobs in order in a daemon thread. The first job starts the thread.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if every job is done."""
        return self._last is None or self._last.done()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job after all jobs that were submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        # This comes before the job is queued, because `is_idle` must not be true while a job waits.
        self._last = future
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Run the submitted jobs, then end the thread. A job must not wait for the thread that calls this."""
        self._jobs.put(None)
        if self._thread is not None:
            # A daemon thread that frees a tensor while the process ends would abort it; see `_run_next`.
            self._thread.join()

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job; return false after the last one.

        A job refers to tensors. The thread drops the job at once, and does not keep the tensors until the
        next job. This prevents an abort: torch frees a tensor without Python's lock, and then takes the lock
        again. After the main thread has ended, Python ends a daemon thread that takes the lock. The end of a
        thread inside of torch's C++ code aborts the process.
        """
        entry = self._jobs.get()
        if entry is None:
            return False
        job, future = entry
        try:
            job()
        except OSError as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return True
