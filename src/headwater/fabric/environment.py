"""The facts that the launcher of a rank passes in environment variables, and the addresses they stand for."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from typing import final

import psutil
import torch.distributed

from headwater.core.errors import RankError
from headwater.fabric.variables import LISTENER, RENDEZVOUS

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: name of the network interface that connects the hosts."""

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclasses.dataclass(frozen=True)
class RankEnvironment:
    """A rank's number and the place of rank 0, as the launcher has set them.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        host: name or address of the first host.
        port: a port of that host.
        given: the address of rank 0 on this host, if the launcher has made a socket for it.
        listener: the descriptor of that socket; only rank 0 has it.
        agent_store: True if torchrun's agent runs a TCP store at `host` and `port`.
        key: the key under which rank 0 writes its address to a store.
        announces: True for the rank of each host that prints what it waits for.
        interface: name of the network interface that the user has chosen, or `None`.
    """

    rank: int
    size: int
    host: str
    port: int
    given: str | None
    listener: str | None
    agent_store: bool
    key: str
    announces: bool
    interface: str | None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankEnvironment:
        """Return the facts in `environment`, or those of `torch.distributed` if it is initialized.

        Raises:
            RankError: if a variable is not set.
        """
        given = environment.get(RENDEZVOUS)
        rank, size = _rank_and_size(environment, _VARIABLES[:2] if given else _VARIABLES)
        return cls(
            rank=rank,
            size=size,
            host=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", "0")),
            given=given,
            listener=environment.get(LISTENER),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            key=f"headwater rank 0, start {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            announces=environment.get("LOCAL_RANK", "0") == "0",
            interface=environment.get(INTERFACE),
        )

    @property
    def place(self) -> str:
        """The place of rank 0, for messages."""
        return "this host" if self.given else f"{self.host}:{self.port}"

    def unknown_host(self) -> str | None:
        """Return why the name of the first host cannot be resolved; `None` if it can."""
        try:
            socket.getaddrinfo(self.host, self.port)
        except socket.gaierror as error:
            return f"the host name of rank 0, {self.host!r}, cannot be resolved: {error.strerror}"
        return None

    def address_to_listen_at(self) -> str:
        """Return the address that MASTER_ADDR names, or "" for all interfaces of this host.

        All interfaces are needed if MASTER_ADDR is a host name that resolves to a loopback address here,
        because the name resolves to another address on other hosts.
        """
        found = str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        is_name = self.host not in (found, "localhost")
        return "" if is_name and found.startswith("127.") else found

    def address_towards_first_host(self) -> str:
        """Return the address of this host on its route to the first host."""
        family, _, _, _, place = socket.getaddrinfo(self.host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: for UDP this only looks up the route
            return self.interface_address() or str(probe.getsockname()[0])

    def interface_address(self) -> str | None:
        """Return the address of the network interface that the user has chosen, or `None`."""
        for each in psutil.net_if_addrs().get(self.interface, []) if self.interface else []:
            if each.family == socket.AF_INET:
                return str(each.address)
        return None


def _rank_and_size(environment: Mapping[str, str], needed: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of this rank and the number of ranks.

    Raises:
        RankError: if a variable is needed and not set.
    """
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    absent = [name for name in needed if not environment.get(name)]
    if absent:
        raise RankError(
            f"this process is one of several ranks, but {', '.join(absent)} is not set",
            where="environment",
            remedy=f"start the ranks with torchrun or srun, or set {', '.join(_VARIABLES)} for each",
        )
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])
