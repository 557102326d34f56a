"""The process of a server: its socket, and its end. Needs the packages starlette and uvicorn."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import logging
import signal
import socket
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.core.signals import handled

if TYPE_CHECKING:
    import uvicorn

    from headwater.serving.service import Service

TOKEN = "HEADWATER_TOKEN"
"""Environment variable with the token of a server."""

_SHORTEST_TOKEN = 16


@dataclasses.dataclass(frozen=True)
class Address:
    """The address on which a server listens, and the token of its users.

    Attributes:
        host: address or name of this machine.
        port: port; 0: a free one.
        token: what requests must send; needed unless the address is a loopback address.
        token_place: the option or variable that the token comes from, for errors.

    Raises:
        ConfigError: if a token is missing, or too short to be a secret.
    """

    host: str
    port: int
    token: str | None = None
    token_place: str = "--token_file"

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(
                f"expected a port from 0 to 65535, got {self.port}",
                where="--port",
                remedy="use, for example, 8000",
            )
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"expected a token, because other machines can reach {self.host} and use the server",
                where="--host",
                remedy=f"set a token with --token_file or the variable {TOKEN}, or listen on 127.0.0.1",
            )
        if self.token is not None and (len(self.token) < _SHORTEST_TOKEN or not self.token.isascii()):
            found = f"one of {len(self.token)}" if self.token.isascii() else "other characters"
            raise ConfigError(
                f"expected a token of at least {_SHORTEST_TOKEN} ASCII characters, got {found}",
                where=self.token_place,
                remedy="make one with: openssl rand -hex 32",
            )


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(address: Address) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        ConfigError: if the port is in use, or the address is not one of this machine.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
            # Now, not when the models are open: a second server on this port must fail before it loads them.
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address.host} port {address.port}: {error.strerror}",
            where="--port",
            remedy="end the other server, or name another port with --port; 0 takes a free one",
        ) from error
    return found


def serve(service: Service, listener: socket.socket, token: str | None, drain_seconds: int) -> None:
    """Answer requests until SIGTERM or SIGINT arrives. Then finish the requests that have begun.

    Args:
        service: answers requests.
        listener: a bound socket.
        token: see `Server`.
        drain_seconds: after this time, unfinished requests are cancelled.
    """
    import uvicorn

    from headwater.serving.app import Server

    config = uvicorn.Config(
        Server(service, token).app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=drain_seconds,
    )
    run_until_signal(uvicorn.Server(config), listener)


def run_until_signal(server: uvicorn.Server, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or SIGINT arrives. Print nothing about requests that the end cancels.

    Args:
        server: the server.
        listener: a bound socket.
    """
    log = logging.getLogger("uvicorn.error")
    worth_printing = functools.partial(_is_worth_printing, server)
    log.addFilter(worth_printing)
    # uvicorn raises the signal again when it has ended. Its own handler does not kill the process then, and
    # also notices a signal that arrives before uvicorn has installed it.
    try:
        with handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), server.handle_exit)):
            server.run(sockets=[listener])
    finally:
        log.removeFilter(worth_printing)


def _is_worth_printing(server: uvicorn.Server, record: logging.LogRecord) -> bool:
    """False for what uvicorn logs about requests that it cancels because the server ends."""
    if not server.should_exit:
        return True
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not isinstance(error, asyncio.CancelledError)
