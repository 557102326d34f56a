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
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, missing in the stubs

from headwater.core.cleanup import on_failure
from headwater.core.errors import HeadwaterError, RankError
from headwater.fabric.codec import decode, encode
from headwater.fabric.connection import Connection
from headwater.fabric.environment import INTERFACE, RankEnvironment
from headwater.fabric.secret import take_secret
from headwater.fabric.switchboard import Address, Switchboard, call, listen_at, listen_on_host
from headwater.fabric.variables import LISTENER

_POLL_S = 0.05
_SAY_AFTER_S = 10.0
_SHORT_S = 30.0
"""Seconds after which fast operations fail: the look-up of a host name, and a request to a store."""

_PURPOSE = "rendezvous"
_BACKLOG = 1024


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
    rank = RankEnvironment.read(os.environ)
    rendezvous = _Rendezvous(rank, own, take_secret(os.environ), timeout_s)
    try:
        store = _store(rendezvous)
        board, table = _lead(rendezvous, store) if rank.rank == 0 else _follow(rendezvous, store)
    except (OSError, RuntimeError) as error:
        raise rendezvous.failure(getattr(error, "strerror", None) or str(error)) from error
    # This process uses the descriptor now. A process that it starts must not find it in the environment.
    os.environ.pop(LISTENER, None)
    return board, [hello.process for hello in table]


@final
@dataclasses.dataclass(frozen=True)
class _Rendezvous:
    """One rank that looks for the others.

    Attributes:
        rank: the facts from the launcher.
        process: this process.
        secret: the secret of the run.
        timeout_s: seconds to wait for all ranks.
    """

    rank: RankEnvironment
    process: Process
    secret: bytes
    timeout_s: float

    @property
    def short_s(self) -> float:
        """Seconds after which a fast operation fails."""
        return min(_SHORT_S, self.timeout_s)

    def hello(self, address: Address) -> _Hello:
        """Return the introduction of this rank, which listens at `address`."""
        return _Hello(self.rank.size, self.process, address)

    def wait(self, missing: Callable[[], str | None], timeout_s: float) -> None:
        """Block until `missing()` returns `None`; raise after `timeout_s`."""
        start, said = time.monotonic(), False
        while (what := missing()) is not None:
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                raise self.failure(f"timed out after {timeout_s:.0f} s; {what}")
            if waited_s > _SAY_AFTER_S and self.rank.announces and not said:
                text = f"rank {self.rank.rank} is waiting ({timeout_s:.0f} s at most): {what}"
                print(text, file=sys.stderr, flush=True)
                said = True
            time.sleep(_POLL_S)

    def failure(self, what: str) -> RankError:
        """Return the error to raise if the rendezvous failed."""
        return RankError(
            f"rendezvous failed: {what}",
            where=self.rank.place,
            remedy="check that all ranks were started, that MASTER_ADDR is the address and MASTER_PORT "
            f"a free port of the first host, and that {INTERFACE} names the network of the hosts",
        )


def _store(rendezvous: _Rendezvous) -> Any:
    """Return the store to which rank 0 writes its address, or `None` if it listens at a known address."""
    rank = rendezvous.rank
    if not rank.given:
        # The name of a host may be known only some time after its pod or node has started.
        rendezvous.wait(rank.unknown_host, _SHORT_S)
    if torch.distributed.is_initialized():
        return torch.distributed.distributed_c10d._get_default_store()
    if rank.given or not rank.agent_store:
        return None
    timeout = timedelta(seconds=rendezvous.short_s)
    return TCPStore(rank.host, rank.port, timeout=timeout, wait_for_workers=False)


# Rank 0


def _lead(rendezvous: _Rendezvous, store: Any) -> tuple[Switchboard, list[_Hello]]:
    """Listen for the other ranks, and introduce all ranks to each other."""
    board = Switchboard(0, rendezvous.secret, _listener(rendezvous.rank, store))
    if store is not None:
        store.set(rendezvous.rank.key, json.dumps(board.address))
    with on_failure(board.close):
        hellos = _answer(rendezvous, board)
    return board, hellos


def _answer(rendezvous: _Rendezvous, board: Switchboard) -> list[_Hello]:
    """Wait for all other ranks, and send each of them the addresses of all."""
    others = range(1, rendezvous.rank.size)
    # `take` could block, but a waiting rank polls: see [Note: rendezvous of ranks].
    rendezvous.wait(lambda: _missing(board, others), rendezvous.timeout_s)
    taken = [board.take(_PURPOSE, other, rendezvous.timeout_s) for other in others]
    connections = [connection for connection in taken if connection is not None]
    assert len(connections) == len(others), "only this thread takes connections of the rendezvous"
    hellos = [rendezvous.hello(board.address)]
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


def _listener(rank: RankEnvironment, store: Any) -> socket.socket:
    """Return the socket at which rank 0 listens: the launcher's, or a new one."""
    if rank.given:
        assert rank.listener is not None, "the launcher gives rank 0 the descriptor of its socket"
        listener = socket.socket(fileno=int(rank.listener))
        # Otherwise a program that rank 0 starts would inherit the socket and keep it open.
        listener.set_inheritable(False)
        return listener
    if store is not None:
        return listen_at(rank.address_towards_first_host(), 0, _BACKLOG)
    return listen_at(rank.address_to_listen_at(), rank.port, _BACKLOG)


def _missing(board: Switchboard, others: range) -> str | None:
    """Return which of the other ranks have not connected; `None` if all have."""
    absent = board.missing(_PURPOSE, others)
    if not absent:
        return None
    refused = "" if board.last_refused is None else f"; {board.last_refused}"
    return f"missing ranks (of {len(others) + 1}): {', '.join(map(str, absent))}{refused}"


# Other ranks


def _follow(rendezvous: _Rendezvous, store: Any) -> tuple[Switchboard, list[_Hello]]:
    """Connect to rank 0, and learn the addresses and processes of all ranks."""
    rank = rendezvous.rank
    found: list[tuple[Address, Connection]] = []
    rendezvous.wait(lambda: _reach(rendezvous, store, found), rendezvous.timeout_s)
    address, connection = found[0]
    own = connection.own_address
    if own is None:
        listener = listen_on_host(_BACKLOG)
    else:
        listener = listen_at(rank.interface_address() or own, 0, _BACKLOG)
    board = Switchboard(rank.rank, rendezvous.secret, listener)
    with on_failure(board.close):
        table = _ask(rendezvous, connection, board)
    # The address at which this rank has reached rank 0 is used instead of the one in the table.
    board.learn([address, *(hello.address for hello in table[1:])])
    return board, table


def _reach(rendezvous: _Rendezvous, store: Any, found: list[tuple[Address, Connection]]) -> str | None:
    """Try to connect to rank 0. Append the connection to `found`, or return why it failed."""
    rank = rendezvous.rank
    address: Address = (rank.host, rank.port)
    try:
        if rank.given:
            address = rank.given
        elif store is not None:
            if not store.check([rank.key]):
                return "rank 0 has not written its address to the store"
            address = _parse(store.get(rank.key))
        connection = call(address, rendezvous.secret, _PURPOSE, rank.rank, 0, rendezvous.short_s)
    except OSError as error:
        return f"rank 0 cannot be reached at {rank.place}: {error.strerror or error}"
    found.append((address, connection))
    return None


def _ask(rendezvous: _Rendezvous, connection: Connection, board: Switchboard) -> list[_Hello]:
    """Send rank 0 the address of this rank; return the addresses and processes of all ranks."""
    rank = rendezvous.rank
    connection.send_message(encode(rendezvous.hello(board.address), _Hello)).result()
    waiting = f"rank 0 at {rank.place} still waits for some of the {rank.size} ranks"
    rendezvous.wait(lambda: None if connection.has_message() else waiting, rendezvous.timeout_s)
    table, failure = decode(connection.receive_message(), _Table)
    connection.close()
    if failure is not None:
        raise failure
    return list(table)


# All ranks


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
                remedy=f"set {INTERFACE} to the network of the hosts, or MASTER_ADDR to an address in it",
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
