"""Ranks as actors of a Ray cluster: placed, started and watched. The one file that knows Ray.

[Note: ranks on Ray]
An actor holds the place of a rank and starts the rank's program as a process of its own, for that of the
actor belongs to Ray: it does not hear signals as ours does, nor print. So the program is the one that every
launcher starts, and it ends with the actor. What it prints goes to files without a name, from which the actor
tells the driver.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError, HeadwaterError, RankError
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.signals import handled
from headwater.fabric.outcome import Failure, exit_code
from headwater.fabric.report import ERROR_FILE, read_report
from headwater.fabric.secret import SECRET, new_secret

os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # of 20 that wait 40 s each for what is no cluster
try:
    import ray
    from ray.exceptions import RayError
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as _error:
    raise ConfigError(f"ranks on Ray need {_error.name}", remedy="pip install 'headwater[ray]'") from _error

_STOP = signal.SIGTERM
"""What a rank gets for Ctrl-C, too: then it ends without a word if it has not begun."""
_WATCH_S = 0.2
_GRACE_S = 10.0
_CONNECT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Request:
    """What ranks ask of a Ray cluster.

    Attributes:
        num_ranks: how many.
        cpus_per_rank: CPUs that are reserved for each, and threads that it computes with.
        gpus_per_rank: GPUs that are reserved for each; it sees no others. It computes on one, or on CPUs.
        ranks_per_node: so many on each node; `None`: as many as fit, on as few nodes as possible.
        address: of the cluster, `host:port`, or `auto`: that of this node.
        wait_s: how long to wait for CPUs and GPUs that others have.
    """

    num_ranks: int
    cpus_per_rank: int
    gpus_per_rank: int
    ranks_per_node: int | None
    address: str
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Node:
    """Where an actor is: the node in Ray's words, its name, an address and a free port there."""

    id: str
    name: str
    address: str
    port: int


@dataclasses.dataclass(frozen=True)
class News:
    """What a rank has printed since it was last asked, and how it has ended, if it has."""

    process: int
    stdout: bytes
    stderr: bytes
    exit_code: int | None
    told: dict[str, Any]


class RankActor:
    """The place of one rank on a node, and its process there; see [Note: ranks on Ray]."""

    def node(self) -> Node:
        """Where this is."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        here = ray.get_runtime_context().get_node_id()
        return Node(here, os.uname().nodename, ray.util.get_node_ip_address(), port)

    def start(self, arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Start the program with these arguments in a folder.

        Raises:
            ConfigError: if the folder is not there.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"there is no folder {folder} on {os.uname().nodename}",
                where="working directory",
                remedy="start the command in a folder that all nodes have",
            )
        self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        self._read = [0, 0]
        stdout, stderr, report = (file.fileno() for file in self._files)
        self._report = f"/proc/self/fd/{report}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headwater", *arguments],
            cwd=folder,
            env={**os.environ, **environment, ERROR_FILE: self._report},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[report],
        )

    def watch(self) -> News:
        """What is new; waits a moment for something."""
        end = time.monotonic() + _WATCH_S
        while True:
            code = self._process.poll()
            stdout, stderr = (self._printed(index, code is not None) for index in range(2))
            if stdout or stderr or code is not None or time.monotonic() > end:
                told = {} if code is None else read_report(self._report)
                return News(self._process.pid, stdout, stderr, code, told)
            time.sleep(0.02)

    def _printed(self, index: int, all_of_it: bool) -> bytes:
        """What has come to a file since; only whole lines unless it is all."""
        file, start = self._files[index].fileno(), self._read[index]
        new = os.pread(file, os.fstat(file).st_size - start, start)
        if not all_of_it:
            new = new[: new.rfind(b"\n") + 1]
        self._read[index] += len(new)
        return new

    def stop(self) -> None:
        """Let the rank stop after its step, or at once if it has been told before."""
        self._process.send_signal(_STOP)


@dataclasses.dataclass
class _Rank:
    """A rank, as the driver sees it."""

    number: int
    actor: Any
    node: Node
    process: int | None = None

    def failure(self, exit_code: int | None, told: dict[str, Any]) -> Failure:
        """It has not ended well."""
        place = f"on {self.node.name}, {self.node.address}"
        if self.process is not None:
            place = f"process {self.process} {place}"
        return Failure(self.number, place, exit_code, told, time.time())


def launch(request: Request, arguments: Sequence[str]) -> int:
    """Run a command of this program as ranks on a Ray cluster; returns its exit code.

    Args:
        request: how many, and where.
        arguments: of the command line; paths mean the same on every node.

    Raises:
        ConfigError: if there is no cluster, or it has no place for them.
        RankError: if an actor cannot start.
        HeadwaterError: what the first rank that failed has met.
    """
    heard: list[int] = []
    with _connected(request.address):
        ranks = _place(request)
        with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, _: heard.append(number))):
            _start(ranks, arguments, request)
            failures = _watch(ranks, heard)
    code = exit_code(failures, [_STOP] if heard else []) if failures else 0
    return INTERRUPTED if code == 128 + _STOP and signal.SIGINT in heard else code


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Within it this process is a driver of the cluster; with it end the actors and their ranks."""
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"this machine is in no Ray cluster: {error}",
            where=address,
            remedy="run `ray start --head` here, or `ray start --address=HOST:PORT`, or submit the command "
            "to the cluster: `ray job submit -- headwater ray fit …`",
        ) from error
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HeadwaterError):
            raise cause from None
        raise RankError(
            f"the ranks do not start: {error}",
            remedy="install the same versions of Headwater, Ray and Python on every node",
        ) from error
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Look whether something listens there: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"{address!r} is no address of a Ray cluster",
            where="--address or RAY_ADDRESS",
            remedy="write HOST:PORT, as `ray start --head` says it, or auto",
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"nothing answers at {address}: {error}",
            where="--address or RAY_ADDRESS",
            remedy="see whether `ray start --head` runs there, and whether the port is right and open",
        ) from error


def _place(request: Request) -> list[_Rank]:
    """Actors for all ranks, numbered node by node."""
    count, on_node = request.num_ranks, request.ranks_per_node or 1
    asked = {"CPU": request.cpus_per_rank, "GPU": request.gpus_per_rank}
    bundles = [{kind: number * on_node for kind, number in asked.items() if number}] * (count // on_node)
    group = placement_group(bundles, strategy="STRICT_SPREAD" if request.ranks_per_node else "PACK")
    if not group.wait(request.wait_s):
        nodes = [_resources(node["Resources"], bundles[0]) for node in ray.nodes() if node["Alive"]]
        raise ConfigError(
            f"the Ray cluster has no place for {len(bundles)} times {_resources(bundles[0], bundles[0])}: "
            f"its nodes have {'; '.join(nodes)}, of which "
            f"{_resources(ray.available_resources(), bundles[0])} together are free",
            remedy="ask for fewer ranks, or less for each (--cpus_per_rank), or wait longer (--wait)",
        )
    actors = [
        ray.remote(RankActor)
        .options(
            num_cpus=request.cpus_per_rank,
            num_gpus=request.gpus_per_rank,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index // on_node),
        )
        .remote()
        for index in range(count)
    ]
    nodes = ray.get([actor.node.remote() for actor in actors])
    ids = list(dict.fromkeys(node.id for node in nodes))
    placed = sorted(zip(nodes, actors, strict=True), key=lambda pair: ids.index(pair[0].id))
    return [_Rank(number, actor, node) for number, (node, actor) in enumerate(placed)]


def _resources(there: Mapping[str, float], kinds: Iterable[str]) -> str:
    """How many there are of some kinds of resources."""
    return ", ".join(f"{there.get(kind, 0):.0f} {kind}s" for kind in kinds)


def _start(ranks: Sequence[_Rank], arguments: Sequence[str], request: Request) -> None:
    """Start the program of every rank; the first listens on its node."""
    hidden = {} if request.gpus_per_rank else {"CUDA_VISIBLE_DEVICES": ""}
    ids = [rank.node.id for rank in ranks]
    hosts, secret = list(dict.fromkeys(ids)), new_secret()
    ray.get([
        rank.actor.start.remote(arguments, str(Path.cwd()), {
            "RANK": str(rank.number),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(rank.number - ids.index(rank.node.id)),
            "GROUP_RANK": str(hosts.index(rank.node.id)),
            "MASTER_ADDR": ranks[0].node.address,
            "MASTER_PORT": str(ranks[0].node.port),
            "OMP_NUM_THREADS": str(request.cpus_per_rank),
            SECRET: secret,
            **hidden,
        })
        for rank in ranks
    ])  # fmt: skip


def _watch(ranks: Sequence[_Rank], heard: Sequence[int]) -> list[Failure]:
    """Prints what ranks print, until all have ended; those that have not ended well.

    When one has failed the others cannot go on. They notice by themselves, and have a while to say so.

    Args:
        ranks: all.
        heard: signals, each of which stops them; grows meanwhile.
    """
    pending = {rank.actor.watch.remote(): rank for rank in ranks}
    failures: list[Failure] = []
    num_sent, end = 0, float("inf")
    while pending and time.monotonic() < end:
        for _ in heard[num_sent:]:
            num_sent += 1
            for rank in pending.values():
                rank.actor.stop.remote()
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_WATCH_S)
        for reference in ready:
            rank = pending.pop(reference)
            try:
                news = ray.get(reference)
            except RayError:
                failures.append(rank.failure(None, {}))
                continue
            rank.process = news.process
            _print(news)
            if news.exit_code is None:
                pending[rank.actor.watch.remote()] = rank
            elif news.exit_code:
                failures.append(rank.failure(news.exit_code, news.told))
        if failures:
            end = min(end, time.monotonic() + _GRACE_S)
    return failures


def _print(news: News) -> None:
    for stream, printed in ((sys.stdout, news.stdout), (sys.stderr, news.stderr)):
        if printed:
            stream.write(printed.decode(errors="replace"))
            stream.flush()
