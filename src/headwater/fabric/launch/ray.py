"""Places, starts and watches ranks as actors of a Ray cluster. The only module that imports Ray.

[Note: ranks on Ray]
An actor reserves the resources of a rank, and starts the rank's program as a separate process. The actor's
process is managed by Ray, which handles its signals and its output. So a rank is the same program under every
launcher, and ends with its actor. Its output goes to unnamed files, which the actor reads for the driver.
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
from headwater.fabric.launch.outcome import Failure, exit_code
from headwater.fabric.report import ERROR_FILE, read_report
from headwater.fabric.secret import SECRET, new_secret

os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # default: 20 tries of 40 s if nothing answers
try:
    import ray
    from ray.exceptions import RayError
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as _error:
    raise ConfigError(f"{_error.name} is not installed", remedy="pip install 'headwater[ray]'") from _error

_STOP = signal.SIGTERM
"""The signal that asks a rank to stop. A rank that has not begun its work ends without a traceback."""
_WATCH_S = 0.2
_GRACE_S = 10.0
_CONNECT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Request:
    """Resources that ranks need in a Ray cluster.

    Attributes:
        num_ranks: number of ranks.
        cpus_per_rank: CPUs that are reserved for each rank, and its number of threads.
        gpus_per_rank: GPUs that are reserved for each rank. It sees no others. 0: ranks compute on CPUs.
        ranks_per_node: number of ranks on each node; `None`: as many as fit, on as few nodes as possible.
        address: the address of the cluster, `host:port`; `auto`: the cluster of this node.
        wait_s: seconds to wait for CPUs and GPUs that are in use.
    """

    num_ranks: int
    cpus_per_rank: int
    gpus_per_rank: int
    ranks_per_node: int | None
    address: str
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Node:
    """The node of an actor: its id in Ray, its host name, its address, and a free port."""

    id: str
    name: str
    address: str
    port: int


@dataclasses.dataclass(frozen=True)
class News:
    """The result of `RankActor.watch`: new output, the exit code after the end, and the error report."""

    process: int
    stdout: bytes
    stderr: bytes
    exit_code: int | None
    report: dict[str, Any]


class RankActor:
    """Reserves the resources of one rank on a node, and runs its process; see [Note: ranks on Ray]."""

    def node(self) -> Node:
        """Return the node of this actor."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        here = ray.get_runtime_context().get_node_id()
        return Node(here, os.uname().nodename, ray.util.get_node_ip_address(), port)

    def start(self, arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Start the program of the rank.

        Args:
            arguments: the arguments of the command line.
            folder: its working directory.
            environment: variables that are added to the actor's.

        Raises:
            ConfigError: if the folder does not exist on this node.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"folder {folder} does not exist on {os.uname().nodename}",
                where="working directory",
                remedy="start the command in a folder that exists on all nodes",
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
        """Wait briefly for output of the rank. Return it, with the exit code if the rank has ended."""
        end = time.monotonic() + _WATCH_S
        while True:
            code = self._process.poll()
            stdout, stderr = (self._printed(index, code is not None) for index in range(2))
            if stdout or stderr or code is not None or time.monotonic() > end:
                report = {} if code is None else read_report(self._report)
                return News(self._process.pid, stdout, stderr, code, report)
            time.sleep(0.02)

    def _printed(self, index: int, all_of_it: bool) -> bytes:
        """Return the text added to a file since the last call; only whole lines unless `all_of_it`."""
        file, start = self._files[index].fileno(), self._read[index]
        new = os.pread(file, os.fstat(file).st_size - start, start)
        # Only whole lines are returned, so that parts of lines of several ranks are not mixed on the screen.
        if not all_of_it:
            new = new[: new.rfind(b"\n") + 1]
        # Only the returned bytes count as read, so the next call returns the rest of a line.
        self._read[index] += len(new)
        return new

    def stop(self) -> None:
        """Ask the rank to stop after its step. A second call makes it stop at once."""
        self._process.send_signal(_STOP)


@dataclasses.dataclass
class _Rank:
    """The driver's record of one rank: its actor and its node."""

    number: int
    actor: Any
    node: Node
    process: int | None = None

    def failure(self, exit_code: int | None, report: dict[str, Any]) -> Failure:
        """Return a `Failure` for this rank, from its exit code and its error report."""
        place = f"on {self.node.name}, {self.node.address}"
        if self.process is not None:
            place = f"process {self.process} {place}"
        return Failure(self.number, place, exit_code, report, time.time())


def launch(request: Request, arguments: Sequence[str]) -> int:
    """Run a command of this program as ranks on a Ray cluster.

    Args:
        request: number of ranks, and their resources.
        arguments: the arguments of the command line. Paths must mean the same on every node.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: if the cluster cannot be reached, or lacks the resources.
        RankError: if an actor cannot start.
        HeadwaterError: the error of the rank that failed first.
    """
    received: list[int] = []
    with _connected(request.address):
        ranks = _place(request)
        with handled(
            dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, _: received.append(number))
        ):
            _start(ranks, arguments, request)
            failures = _watch(ranks, received)
    code = exit_code(failures, [_STOP] if received else []) if failures else 0
    return INTERRUPTED if code == 128 + _STOP and signal.SIGINT in received else code


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect this process to a Ray cluster in the context. Actors and ranks end with the context."""
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"this machine is not in a Ray cluster: {error}",
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
            f"the ranks cannot be started: {error}",
            remedy="install the same versions of Headwater, Ray and Python on every node",
        ) from error
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise `ConfigError` if nothing listens at the address. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"expected HOST:PORT or auto as the address of a Ray cluster, got {address!r}",
            where="--address or RAY_ADDRESS",
            remedy="write the address that `ray start --head` prints, or auto",
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"nothing answers at {address}: {error}",
            where="--address or RAY_ADDRESS",
            remedy="check that `ray start --head` runs there, and that the port is right and open",
        ) from error


def _place(request: Request) -> list[_Rank]:
    """Create an actor for each rank, and return them in rank order: all of one node, then the next.

    Raises:
        ConfigError: if the cluster does not have the resources free in time.
    """
    count, on_node = request.num_ranks, request.ranks_per_node or 1
    asked = {"CPU": request.cpus_per_rank, "GPU": request.gpus_per_rank}
    bundles = [{kind: number * on_node for kind, number in asked.items() if number}] * (count // on_node)
    group = placement_group(bundles, strategy="STRICT_SPREAD" if request.ranks_per_node else "PACK")
    if not group.wait(request.wait_s):
        nodes = [_resources(node["Resources"], bundles[0]) for node in ray.nodes() if node["Alive"]]
        raise ConfigError(
            f"the Ray cluster cannot provide {len(bundles)} times {_resources(bundles[0], bundles[0])}: "
            f"its nodes have {'; '.join(nodes)}; "
            f"free on all nodes together: {_resources(ray.available_resources(), bundles[0])}",
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
    # Actors are sorted by node: Ray places them in any order, and ranks of a node must be consecutive.
    ids = list(dict.fromkeys(node.id for node in nodes))
    placed = sorted(zip(nodes, actors, strict=True), key=lambda pair: ids.index(pair[0].id))
    return [_Rank(number, actor, node) for number, (node, actor) in enumerate(placed)]


def _resources(there: Mapping[str, float], kinds: Iterable[str]) -> str:
    """Return a text with the amounts of some kinds of resources, for messages."""
    return ", ".join(f"{there.get(kind, 0):.0f} {kind}s" for kind in kinds)


def _start(ranks: Sequence[_Rank], arguments: Sequence[str], request: Request) -> None:
    """Start the program of every rank. Rank 0 listens on its node."""
    # Ray shows all GPUs to an actor that reserves none.
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


def _watch(ranks: Sequence[_Rank], received: Sequence[int]) -> list[Failure]:
    """Print the output of all ranks until all have ended; return those that failed.

    When a rank has failed the others cannot continue. They notice it themselves, and have a grace period to
    report it.

    Args:
        ranks: all ranks.
        received: signals that this process has received. Each stops the ranks; the list grows meanwhile.
    """
    pending = {rank.actor.watch.remote(): rank for rank in ranks}
    failures: list[Failure] = []
    num_sent, end = 0, float("inf")
    while pending and time.monotonic() < end:
        for _ in received[num_sent:]:
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
                failures.append(rank.failure(news.exit_code, news.report))
        if failures:
            # The grace period begins with the first failure. `min` keeps its end when others follow.
            end = min(end, time.monotonic() + _GRACE_S)
    return failures


def _print(news: News) -> None:
    for stream, printed in ((sys.stdout, news.stdout), (sys.stderr, news.stderr)):
        if printed:
            stream.write(printed.decode(errors="replace"))
            stream.flush()
