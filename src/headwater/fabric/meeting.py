"""How the ranks that a launcher has started find each other: all come to where the first one listens.

Whoever waits asks again and again, so that it can be interrupted, and says what it waits for. Left alone,
`torch.distributed` waits as long, says nothing that names a rank, and hears no Ctrl-C.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import psutil
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # of the documents, not of its stubs

from headwater.core.errors import RankError
from headwater.fabric.parent import LISTENER

_POLL_S = 0.1
_SAY_AFTER_S = 10.0
_SHORT_S = 30.0
"""For what should take no time: a name to be found, and an answer of a rank that listens."""

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def meet(timeout_s: float) -> None:
    """Start `torch.distributed` for the ranks that the environment tells of.

    Args:
        timeout_s: how long to wait for all of them, and later for an answer of one.

    Raises:
        RankError: if they do not find each other.
    """
    _Meeting(os.environ, timeout_s).begin()
    os.environ.pop(LISTENER, None)


class _Meeting:
    """The first steps of one rank.

    Args:
        environment: the variables of `torch.distributed`.
        timeout_s: how long to wait for all.
    """

    def __init__(self, environment: Mapping[str, str], timeout_s: float) -> None:
        absent = [name for name in _VARIABLES if not environment.get(name)]
        if absent:
            raise RankError(
                f"this process is one of several ranks, and is not told {', '.join(absent)}",
                where="environment",
                remedy=f"start ranks with torchrun or srun, or set {', '.join(_VARIABLES)} for each",
            )
        self._rank, self._size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._address, self._port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        # Under torchrun the launcher of the first host listens for its ranks.
        self._listens = self._rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._listener = int(environment[LISTENER]) if LISTENER in environment else None
        self._says = environment.get("LOCAL_RANK", "0") == "0"  # once for each host
        self._timeout_s = timeout_s

    def begin(self) -> None:
        """Meet the others, and start `torch.distributed` with them."""
        self._wait(self._find_name, _SHORT_S)
        _choose_interface(self._address)
        if not self._listens:
            self._wait(self._reach, self._timeout_s)
        try:
            store = TCPStore(
                self._address,
                self._port,
                is_master=self._listens,
                timeout=timedelta(seconds=min(_SHORT_S, self._timeout_s)),
                wait_for_workers=False,
                master_listen_fd=self._listener,
                multi_tenant=True,
            )
            store.set(_name(self._rank), "here")
            self._wait(lambda: self._count(store), self._timeout_s)
            timeout = timedelta(seconds=self._timeout_s)
            store.set_timeout(timeout)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=self._rank, world_size=self._size, timeout=timeout
            )
        except RuntimeError as error:
            raise self._failure(str(error)) from error

    def _wait(self, missing: Callable[[], str | None], timeout_s: float) -> None:
        """Return when nothing is missing any more."""
        start, said = time.monotonic(), False
        while (what := missing()) is not None:
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                raise self._failure(f"after {timeout_s:.0f} s {what}")
            if waited_s > _SAY_AFTER_S and self._says and not said:
                text = f"rank {self._rank} waits, {timeout_s:.0f} s at most: {what}"
                print(text, file=sys.stderr, flush=True)
                said = True
            time.sleep(_POLL_S)

    def _find_name(self) -> str | None:
        try:
            socket.getaddrinfo(self._address, self._port)
        except socket.gaierror as error:
            return f"nobody knows the host of rank 0, {self._address!r}: {error.strerror}"
        return None

    def _reach(self) -> str | None:
        try:
            socket.create_connection((self._address, self._port), timeout=_SAY_AFTER_S).close()
        except OSError as error:
            return f"rank 0 cannot be reached at {self._address}:{self._port}: {error.strerror or error}"
        return None

    def _count(self, store: TCPStore) -> str | None:
        if store.check([_name(rank) for rank in range(self._size)]):
            return None
        absent = [str(rank) for rank in range(self._size) if not store.check([_name(rank)])]
        return f"of {self._size} ranks these have not come: {', '.join(absent)}"

    def _failure(self, what: str) -> RankError:
        return RankError(
            f"the ranks do not find each other: {what}",
            where=f"{self._address}:{self._port}",
            remedy="see whether all were started, whether address and port of the first host (MASTER_ADDR, "
            "MASTER_PORT) are right and free, and whether GLOO_SOCKET_IFNAME names the network of the hosts",
        )


def _name(rank: int) -> str:
    """By which a rank says that it is here."""
    return f"headwater rank {rank}"


def _choose_interface(address: str) -> None:
    """Let gloo use the network by which the first rank is reached, not the one of this host's name."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it asks for the route
        except OSError:
            return
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
