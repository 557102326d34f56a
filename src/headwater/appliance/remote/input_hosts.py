"""Input workers that a run starts on other hosts over SSH, and starts again whenever they end."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

from headwater.appliance.remote.address import Address
from headwater.appliance.remote.ssh import command_line, explain
from headwater.core.errors import ConfigError, HeadwaterError

READY = "serving "
"""Beginning of the line that a worker prints when ranks can connect; its last word is host:port."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_END_S = 5.0


@contextmanager
def started_workers(
    hosts: Sequence[Address], order: Mapping[str, Any], say: Callable[[str], None]
) -> Iterator[list[str]]:
    """Start an input worker on each of these hosts, and end all of them with the context.

    Args:
        hosts: the hosts; a host that is named twice gets two workers.
        order: what the workers read from stdin; see `headwater input_worker -`.
        say: prints a notice when a worker is started again.

    Yields:
        The addresses `host:port` of the workers, which they keep.

    Raises:
        HeadwaterError: if a worker does not start.
    """
    with ExitStack() as ends:
        workers = []
        for host in hosts:
            workers.append(_Worker(host, order, say))
            ends.callback(workers[-1].close)
        yield [worker.start() for worker in workers]


@final
class _Worker:
    """An input worker on another host. It ends when its stdin is closed, so also when this process ends.

    Args:
        host: the host.
        order: what it reads from stdin.
        say: prints a notice when it is started again.
    """

    def __init__(self, host: Address, order: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._host = host
        self._order = dict(order)
        self._say = say
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start the worker, and a thread that starts it again. Return its address.

        Raises:
            HeadwaterError: if it does not start.
        """
        place = self._begin()
        # Ranks know this address, so the worker must have it again after its restart.
        self._order["port"] = int(place.rpartition(":")[2])
        self._thread = threading.Thread(target=self._watch, args=(place,), daemon=True)
        self._thread.start()
        return place

    def close(self) -> None:
        """End the worker."""
        self._closing.set()
        self._end()
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> str:
        """Start the process and wait until it serves. Return its address."""
        # With BatchMode ssh does not prompt. A prompt would come in the middle of a run.
        words = command_line(self._host, os.environ, "input_worker -", ("BatchMode=yes",))
        with tempfile.TemporaryFile() as messages:
            try:
                # The worker has a new session, so Ctrl-C does not end it. The run still finishes its step,
                # which needs batches.
                process = self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot start {words[0]}: {error.strerror}", remedy="install the OpenSSH client"
                ) from error
            if self._closing.is_set():
                self._end()
            place = _first_place(process, json.dumps(self._order).encode() + b"\n")
            if place is not None:
                return place
            self._end()
            messages.seek(0)
            raise self._failure(process.returncode, messages.read().decode(errors="replace").strip())

    def _failure(self, exit_code: int, messages: str) -> HeadwaterError:
        if exit_code in (1, 2) and "stdio" not in messages:
            return ConfigError(
                f"the input worker does not start: {messages}",
                where=str(self._host),
                remedy="install the same version of headwater there, and put the data at the same path",
            )
        return explain(self._host, exit_code, messages).error

    def _watch(self, place: str) -> None:
        """Start the worker again whenever it ends, until `close`."""
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._process is not None, "it has been started"
            self._process.wait()
            if self._closing.wait(pause_s):
                return
            self._end()  # closes its pipes
            try:
                self._begin()
            except HeadwaterError as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._say(f"input worker {place} on {self._host} cannot be started again: {error.what}")
            else:
                pause_s = _FIRST_PAUSE_S
                self._say(f"input worker {place} on {self._host} had ended, and was started again")

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            process.stdin.close()
            process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        process.stdout.close()


def _first_place(process: subprocess.Popen[bytes], order: bytes) -> str | None:
    """Send a worker its order. Return its address, or `None` if it ends before it serves."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(order)
        process.stdin.flush()
    except (BrokenPipeError, ValueError):  # ValueError: `close` was faster
        return None
    for line in iter(process.stdout.readline, b""):
        text = line.decode(errors="replace").strip()
        if text.startswith(READY):  # lines before it come from login scripts
            return text.split()[-1]
    return None
