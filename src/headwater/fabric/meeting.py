"""Rendezvous: every rank connects to rank 0, which sends all ranks the addresses of the others.

[Note: rendezvous of ranks]
Rank 0 listens, and accepts only ranks that know the secret of the run. The launcher of one host gives it a
socket that only this host reaches. Otherwise it listens at the address that MASTER_ADDR and MASTER_PORT name.
Where `torchrun` has a store of `torch.distributed` at that address, rank 0 listens at a second port and
writes its number to the store. The store is not trusted: the process that answers must know the secret.

A waiting rank polls, so that it can be interrupted and can print what it waits for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any, final

import psutil
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, missing in the stubs

from headwater.core.cleanup import on_failure
from headwater.core.errors import HeadwaterError, RankError
from headwater.fabric.codec import decode, encode
from headwater.fabric.connection import Connection
from headwater.fabric.parent import LISTENER, RENDEZVOUS
from headwater.fabric.secret import take_secret
from headwater.fabric.switchboard import Address, Switchboard, call, listen_at, listen_on_host

_POLL_S = 0.05
_SAY_AFTER_S = 10.0
_SHORT_S = 30.0
"""Seconds after which fast operations fail: the look-up of a host name, and a request to a store."""

_PURPOSE = "rendezvous"
_BACKLOG = 1024
_INTERFACE = "GLOO_SOCKET_IFNAME"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Process:
    """The facts that a rank sends to the other ranks about its process.

    Attributes:
        host: name of its host.
        pid: its process number there.
        file: its descriptor of a file in memory. The leader's is the shared memory of the host.
    """

    host: str
    pid: int
    file: int


@dataclasses.dataclass(frozen=True)
class _Hello:
    """The message with which a rank introduces itself to rank 0, which forwards it to all ranks.

    Attributes:
        size: number of ranks, as its launcher told it.
        process: its process.
        address: where it listens.
    """

    size: int
    process: Process
    address: Address


_Table = tuple[list[_Hello], HeadwaterError | None]


def meet(own: Process, timeout_s: float) -> tuple[Switchboard, list[Process]]:
    """Find the other ranks by the environment variables of the launcher.

    Args:
        own: this process.
        timeout_s: seconds to wait for all ranks.

    Returns:
        The connections of this rank, and the process of each rank.

    Raises:
        RankError: if a rank does not connect in time, or a process answers that is not a rank.
    """
    found = _Rendezvous(os.environ, own, timeout_s).run()
    # This process uses the descriptor now. A process that it starts must not find it in the environment.
    os.environ.pop(LISTENER, None)
    return found


@final
class _Rendezvous:
    """The rendezvous as one rank runs it: it finds the other ranks and learns their processes.

    Args:
        environment: variables of `torch.distributed`. The secret is removed from it.
        own: this process.
        timeout_s: seconds to wait for all ranks.
    """

    def __init__(self, environment: MutableMapping[str, str], own: Process, timeout_s: float) -> None:
        self._environment = environment
        self._process = own
        self._store: Any = None
        self._given = environment.get(RENDEZVOUS)
        if torch.distributed.is_initialized():
            self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self._store = torch.distributed.distributed_c10d._get_default_store()
        else:
            names = _VARIABLES[:2] if self._given else _VARIABLES
            absent = [name for name in names if not environment.get(name)]
            if absent:
                raise RankError(
                    f"this process is one of several ranks, but {', '.join(absent)} is not set",
                    where="environment",
                    remedy=f"start the ranks with torchrun or srun, or set {', '.join(_VARIABLES)} for each",
                )
            self._rank, self._size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._host = environment.get("MASTER_ADDR", "127.0.0.1")
        self._port = int(environment.get("MASTER_PORT", "0"))
        self._place = "this host" if self._given else f"{self._host}:{self._port}"
        self._key = f"headwater rank 0, start {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._announces = environment.get("LOCAL_RANK", "0") == "0"  # one rank of each host prints
        self._timeout_s = timeout_s
        self._secret = take_secret(environment)

    def run(self) -> tuple[Switchboard, list[Process]]:
        """Return the connections of this rank, and the process of each rank."""
        try:
            if not self._given:
                # A name may be known only after a pod or node has started.
                self._wait(self._find_name, _SHORT_S)
                if self._store is None and self._environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    self._store = self._agent_store()
            board, table = self._lead() if self._rank == 0 else self._follow()
        except (OSError, RuntimeError) as error:
            raise self._failure(getattr(error, "strerror", None) or str(error)) from error
        return board, [hello.process for hello in table]

    def _agent_store(self) -> TCPStore:
        """Connect to the TCP store that torchrun's agent runs on the first host."""
        timeout = timedelta(seconds=min(_SHORT_S, self._timeout_s))
        return TCPStore(self._host, self._port, timeout=timeout, wait_for_workers=False)

    # rank 0

    def _lead(self) -> tuple[Switchboard, list[_Hello]]:
        board = Switchboard(0, self._secret, self._listener())
        if self._store is not None:
            self._store.set(self._key, json.dumps(board.address))
        with on_failure(board.close):
            hellos = self._answer(board)
        return board, hellos

    def _answer(self, board: Switchboard) -> list[_Hello]:
        """Wait for all other ranks, and send each of them the addresses of all."""
        others = range(1, self._size)
        # `take` could block, but a waiting rank polls: see [Note: rendezvous of ranks].
        self._wait(lambda: self._missing(board), self._timeout_s)
        taken = [board.take(_PURPOSE, other, self._timeout_s) for other in others]
        connections = [connection for connection in taken if connection is not None]
        assert len(connections) == len(others), "only this thread takes connections of the rendezvous"
        hellos = [self._hello(board.address)]
        hellos += [decode(connection.receive_message(), _Hello) for connection in connections]
        # The error is sent with the table, so that all ranks raise it.
        failure = _check(hellos)
        for connection in connections:
            connection.send_message(encode((hellos, failure), _Table)).result()
            connection.close()  # also ends the connection's thread, which sends long tables
        if failure is not None:
            raise failure
        # This comes after the check, so that addresses of a wrong table are never used.
        board.learn([hello.address for hello in hellos])
        return hellos

    def _listener(self) -> socket.socket:
        if self._given:
            listener = socket.socket(fileno=int(self._environment[LISTENER]))
            # Otherwise a program that rank 0 starts would inherit the socket and keep it open.
            listener.set_inheritable(False)
            return listener
        if self._store is not None:
            return listen_at(self._own_address(), 0, _BACKLOG)
        return listen_at(self._address_to_listen_at(), self._port, _BACKLOG)

    def _address_to_listen_at(self) -> str:
        """Return the address that MASTER_ADDR names, or "" for all interfaces of this host.

        All interfaces are needed if MASTER_ADDR is a host name that resolves to a loopback address here,
        because the name resolves to another address on other hosts.
        """
        found = str(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][4][0])
        is_name = self._host not in (found, "localhost")
        return "" if is_name and found.startswith("127.") else found

    def _missing(self, board: Switchboard) -> str | None:
        absent = board.missing(_PURPOSE, range(1, self._size))
        if not absent:
            return None
        refused = "" if board.last_refused is None else f"; {board.last_refused}"
        return f"missing ranks (of {self._size}): {', '.join(map(str, absent))}{refused}"

    # other ranks

    def _follow(self) -> tuple[Switchboard, list[_Hello]]:
        found: list[tuple[Address, Connection]] = []
        self._wait(lambda: self._reach(found), self._timeout_s)
        address, connection = found[0]
        own = connection.own_address
        if own is None:
            listener = listen_on_host(_BACKLOG)
        else:
            listener = listen_at(self._interface() or own, 0, _BACKLOG)
        board = Switchboard(self._rank, self._secret, listener)
        with on_failure(board.close):
            table = self._ask(connection, board)
        # The address at which this rank has reached rank 0 is used instead of the one in the table.
        board.learn([address, *(hello.address for hello in table[1:])])
        return board, table

    def _ask(self, connection: Connection, board: Switchboard) -> list[_Hello]:
        """Send rank 0 the address of this rank; return the addresses and processes of all ranks."""
        connection.send_message(encode(self._hello(board.address), _Hello)).result()
        waiting = f"rank 0 at {self._place} still waits for some of the {self._size} ranks"
        self._wait(lambda: None if connection.has_message() else waiting, self._timeout_s)
        table, failure = decode(connection.receive_message(), _Table)
        connection.close()
        if failure is not None:
            raise failure
        return list(table)

    def _reach(self, found: list[tuple[Address, Connection]]) -> str | None:
        """Try to connect to rank 0. Append the connection to `found`, or return why it failed."""
        address: Address = (self._host, self._port)
        try:
            if self._given:
                address = self._given
            elif self._store is not None:
                if not self._store.check([self._key]):
                    return "rank 0 has not written its address to the store"
                address = _parse(self._store.get(self._key))
            within_s = min(_SHORT_S, self._timeout_s)
            found.append((address, call(address, self._secret, _PURPOSE, self._rank, 0, within_s)))
        except OSError as error:
            return f"rank 0 cannot be reached at {self._place}: {error.strerror or error}"
        return None

    # all ranks

    def _hello(self, address: Address) -> _Hello:
        return _Hello(self._size, self._process, address)

    def _own_address(self) -> str:
        """Return the address of this host on its route to the first host."""
        family, _, _, _, place = socket.getaddrinfo(self._host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: for UDP this only looks up the route
            return self._interface() or str(probe.getsockname()[0])

    def _interface(self) -> str | None:
        """Return the address of the network interface that the user has named, or `None`."""
        name = self._environment.get(_INTERFACE)
        for each in psutil.net_if_addrs().get(name, []) if name else []:
            if each.family == socket.AF_INET:
                return str(each.address)
        return None

    def _find_name(self) -> str | None:
        try:
            socket.getaddrinfo(self._host, self._port)
        except socket.gaierror as error:
            return f"the host name of rank 0, {self._host!r}, cannot be resolved: {error.strerror}"
        return None

    def _wait(self, missing: Callable[[], str | None], timeout_s: float) -> None:
        """Block until `missing()` returns `None`; raise after `timeout_s`."""
        start, said = time.monotonic(), False
        while (what := missing()) is not None:
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                raise self._failure(f"timed out after {timeout_s:.0f} s; {what}")
            if waited_s > _SAY_AFTER_S and self._announces and not said:
                text = f"rank {self._rank} is waiting ({timeout_s:.0f} s at most): {what}"
                print(text, file=sys.stderr, flush=True)
                said = True
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> RankError:
        return RankError(
            f"rendezvous failed: {what}",
            where=self._place,
            remedy="check that all ranks were started, that MASTER_ADDR is the address and MASTER_PORT "
            f"a free port of the first host, and that {_INTERFACE} names the network of the hosts",
        )


def _check(hellos: list[_Hello]) -> RankError | None:
    """Return the error to raise if the introductions of ranks contradict each other, otherwise `None`."""
    for rank, hello in enumerate(hellos):
        if hello.size != len(hellos):
            return RankError(
                f"WORLD_SIZE differs between ranks: rank 0 has {len(hellos)}, rank {rank} has {hello.size}",
                remedy="start all with the same WORLD_SIZE",
            )
        is_local = not isinstance(hello.address, str) and hello.address[0].startswith("127.")
        if rank and is_local and any(_machine(other) != _machine(hello) for other in hellos):
            return RankError(
                f"rank {rank} on {hello.process.host} listens at {hello.address[0]}, which only its own host "
                "can reach",
                remedy=f"set {_INTERFACE} to the network of the hosts, or MASTER_ADDR to an address in it",
            )
    return None


def _machine(hello: _Hello) -> str:
    """Return the name of a rank's machine. A launcher may treat one machine as several hosts."""
    return hello.process.host.partition(" ")[0]


def _parse(text: bytes) -> Address:
    """Return the address that a store holds; raise if the text is not an address."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and type(found[1]) is int:
        return found[0], found[1]
    raise OSError(f"expected an address in the store, got {text[:80]!r}")
