"""The process `ssh` that connects to an appliance, and what its failures mean."""

from __future__ import annotations

import dataclasses
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from headwater.appliance.remote.address import Address
from headwater.core.errors import ConfigError, HeadwaterError, QueueError
from headwater.core.signals import handled

SSH = "HEADWATER_SSH"
"""Environment variable with the command `ssh` and its options, as GIT_SSH_COMMAND has for git."""
COMMAND = "HEADWATER_APPLIANCE_COMMAND"
"""Environment variable with the command that starts Headwater on the appliance."""

_OPTIONS = ("ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4", "ClearAllForwardings=yes")
_BLOCK = 1 << 18
_END_S = 5.0
_OF_SSH, _NOT_FOUND, _NOT_EXECUTABLE, _BAD_INPUT = 255, 127, 126, 2


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a connection ended or was not made.

    Attributes:
        error: the error for the user.
        is_final: true if another attempt would fail as well.
    """

    error: HeadwaterError
    is_final: bool


class BrokenConnectionError(Exception):
    """The connection ended. `Process.failure` has the reason."""


def command_line(
    address: Address, environment: Mapping[str, str], command: str = "jobs stdio", options: Sequence[str] = ()
) -> list[str]:
    """Return the command that connects to a machine and starts Headwater there.

    Args:
        address: the machine.
        environment: the environment variables of this process.
        command: the words after `headwater`, as a shell reads them; the server of an appliance if not given.
        options: further options of SSH.

    Raises:
        ConfigError: if the variable `HEADWATER_SSH` cannot be divided into words.
    """
    try:
        words = shlex.split(environment.get(SSH, "")) or ["ssh"]
    except ValueError as error:
        raise ConfigError(
            f"cannot divide {environment[SSH]!r} into words: {error}", where=SSH, remedy="close the quotes"
        ) from error
    pairs = [word for option in (*_OPTIONS, *options) for word in ("-o", option)]
    port = [] if address.port is None else ["-p", str(address.port)]
    user = [] if address.user is None else ["-l", address.user]
    server = f"{environment.get(COMMAND) or 'headwater'} {command}"
    # The user's options come first: ssh uses the first value of each.
    return [*words, *pairs, "-T", *port, *user, "--", address.host, server]


class Process:
    """A running `ssh` with the server at its other end.

    Args:
        address: the appliance.

    Raises:
        ConfigError: if `ssh` cannot be started.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        # The messages go to a file, because a full pipe would block ssh.
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        words = command_line(address, os.environ)
        try:
            # Ctrl-C reaches the whole process group. The connection must survive it, and ssh keeps an ignored
            # signal ignored. In a separate process group, ssh could not prompt on the terminal.
            with handled({signal.SIGINT: signal.SIG_IGN}):
                self._process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, bufsize=0
                )
        except OSError as error:
            self._messages.close()
            raise ConfigError(
                f"cannot start {words[0]}: {error.strerror}",
                where=SSH if SSH in os.environ else None,
                remedy="install the OpenSSH client",
            ) from error

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send bytes.

        Raises:
            BrokenConnectionError: if the connection ended, or nothing could be sent for `timeout_s` seconds.
        """
        assert self._process.stdin is not None, "it is a pipe"
        pipe, rest = self._process.stdin.fileno(), memoryview(data)
        os.set_blocking(pipe, False)
        while rest:
            if not select.select((), (pipe,), (), timeout_s)[1]:
                raise BrokenConnectionError
            try:
                rest = rest[os.write(pipe, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise BrokenConnectionError from error

    def receive(self, timeout_s: float) -> bytes:
        """Return the next bytes; block until there are some.

        Raises:
            BrokenConnectionError: if the connection ended, or nothing came for `timeout_s` seconds.
        """
        assert self._process.stdout is not None, "it is a pipe"
        pipe = self._process.stdout.fileno()
        if not select.select((pipe,), (), (), timeout_s)[0]:
            raise BrokenConnectionError
        data = os.read(pipe, _BLOCK)
        if not data:
            raise BrokenConnectionError
        return data

    def failure(self) -> Failure:
        """End the process and return why the connection ended."""
        self._end(time.monotonic() + _END_S)
        self._messages.seek(0)
        text = self._messages.read().decode(errors="replace").replace("\r", "").strip()
        return explain(self._address, self._process.returncode, text)

    def close(self) -> None:
        """End the process and release its pipes."""
        self._end(time.monotonic())
        for file in (self._process.stdout, self._messages):
            assert file is not None, "it is a pipe or a file"
            file.close()

    def _end(self, deadline: float) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()  # the server ends when its input ends
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def explain(address: Address, exit_code: int, messages: str) -> Failure:
    """Return the error for a connection that ended.

    Args:
        address: the appliance.
        exit_code: the exit code of `ssh`: that of the server's command, 255 if the connection failed, or a
            negative number if a signal ended `ssh`.
        messages: the last messages of `ssh` and the server.
    """
    where, last = str(address), messages.splitlines()[-1] if messages else "no message"
    target = f"{address.user}@{address.host}" if address.user else address.host
    if exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
        remedy = (
            f"install headwater {version('headwater')} on that machine; if it is in a virtual environment, "
            f"name it: {COMMAND}=/path/to/venv/bin/headwater"
        )
        return Failure(QueueError(f"headwater was not found there: {last}", where=where, remedy=remedy), True)
    if exit_code == _BAD_INPUT and "stdio" in messages:
        remedy = f"install headwater {version('headwater')} on that machine"
        what = f"headwater on that machine has no remote server, so it has another version: {last}"
        return Failure(QueueError(what, where=where, remedy=remedy), True)
    if 0 <= exit_code != _OF_SSH:
        ended = f"the server on that machine ended with exit code {exit_code}: {last}"
        remedy = f"see what this prints: ssh {target} headwater jobs list"
        return Failure(QueueError(ended, where=where, remedy=remedy), True)
    for phrases, what, remedy, is_final in _OF_MESSAGES:
        if any(phrase in messages for phrase in phrases):
            remedy = remedy.format(target=target, host=address.host)
            return Failure(QueueError(f"{what}: {last}", where=where, remedy=remedy), is_final)
    remedy = f"see if `ssh {target}` works, and that the machine is running"
    return Failure(QueueError(f"the machine cannot be reached: {last}", where=where, remedy=remedy), False)


_OF_MESSAGES = (
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED", "Host key verification failed"),
        "the identity of the machine is unknown, or has changed",
        "run `ssh {target}` once and compare the fingerprint; after a new installation of that machine first "
        "run: ssh-keygen -R {host}",
        True,
    ),
    (
        ("Permission denied", "Too many authentication failures"),
        "the machine refuses the login",
        "let `ssh {target}` work without a password: ssh-copy-id {target}; or name the key in ~/.ssh/config",
        True,
    ),
    (
        ("Could not resolve hostname",),
        "the name of the machine is unknown",
        "check the name, the network and ~/.ssh/config",
        False,
    ),
    (
        ("Bad configuration option", "unknown option", "Can't open user config file"),
        "ssh does not accept its options",
        "check HEADWATER_SSH and ~/.ssh/config",
        True,
    ),
)
"""Messages of `ssh`, with the meaning, the remedy, and true if another attempt would fail as well."""
