"""Ranks for a test: forked processes that have joined each other."""

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import traceback

import torch

from children import let_forks_compute_gradients
from headwater.fabric.cluster import join_ranks
from headwater.plan.known_traces import KnownTraces

TIMEOUT_S = 200

let_forks_compute_gradients()


def free_port():
    """Return a port of this machine at which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(function, count=2, hosts=1, num_memx=0, timeout_s=TIMEOUT_S / 2, port=None):
    """Return the result of `function(fabric)` on each rank.

    Args:
        function: the function that each rank calls.
        count: the number of ranks.
        hosts: the number of hosts that the ranks pretend to be divided among.
        num_memx: the number of store ranks; these are the last ranks.
        timeout_s: how long a rank waits for another, in seconds.
        port: the port at which rank 0 listens; a free one by default.

    Raises:
        AssertionError: a rank has failed; the message has its traceback.
    """
    ranks, channels = _start(function, count, hosts, num_memx, timeout_s, port)
    results = []
    try:
        for receiving in channels:
            assert receiving.poll(TIMEOUT_S), "a rank says nothing"
            results.append(receiving.recv())
    finally:
        for rank in ranks:
            rank.join(0 if len(results) < count else TIMEOUT_S)
            rank.kill()
    for failed, _ in results:
        assert not failed, "\n".join(text for text, _ in results)
    return [result for _, result in results]


def errors_beside(killed, function, count=2):
    """Return the tracebacks of all ranks except `killed`, which must end itself in `function(fabric)`."""
    ranks, channels = _start(function, count, hosts=1, num_memx=0, timeout_s=TIMEOUT_S / 2, port=None)
    try:
        found = []
        for rank in set(range(count)) - {killed}:
            assert channels[rank].poll(TIMEOUT_S), "a rank says nothing"
            text, _ = channels[rank].recv()
            assert text, f"rank {rank} has not failed"
            found.append(text)
        ranks[killed].join(TIMEOUT_S)
        assert ranks[killed].exitcode == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
    return found


def _start(function, count, hosts, num_memx, timeout_s, port):
    """Start the ranks. Return their processes, and the channels by which they send their results."""
    context = multiprocessing.get_context("fork")
    port = port or free_port()
    channels = [context.Pipe(duplex=False) for _ in range(count)]
    ranks = [
        context.Process(
            target=_be_rank,
            args=(function, rank, count, rank * hosts // count, num_memx, timeout_s, port, channel[1]),
            daemon=True,
        )
        for rank, channel in enumerate(channels)
    ]
    for rank in ranks:
        rank.start()
    return ranks, [receiving for receiving, _ in channels]


def _be_rank(function, rank, count, host, num_memx, timeout_s, port, channel):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(host),
    }
    torch.set_num_threads(1)
    try:
        fabric = join_ranks(timeout_s=timeout_s, num_memx=num_memx)
        channel.send(("", function(fabric)))
        fabric.barrier("the others")
    except BaseException:  # noqa: BLE001  # `pytest.fail` and `pytest.skip` raise one
        # The parent process raises what this sends.
        channel.send((f"rank {rank}:\n{traceback.format_exc()}", None))
    finally:
        os._exit(0)


class TracesOfRanks(KnownTraces):
    """Traces in files, so that ranks of one program that are forks of one process make each dry run once.

    Args:
        folder: the folder of the files. Several runs of the program share it if they differ only in the plan.
    """

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, conditions, make):
        """Return the trace of the next dry run; one rank makes it while the others wait."""
        # Forks have the same seed of hashes.
        with (self._folder / f"{self._made}-{hash(conditions)}").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if content := file.read():
                trace = pickle.loads(content)
            else:
                trace = make()
                file.write(pickle.dumps(trace))
        self._made += 1
        return trace


def traces_of_ranks(folder):
    """Return a context in which ranks share traces, unless all dry runs are to be made."""
    if os.environ.get("HEADWATER_ALL_DRY_RUNS"):
        return contextlib.nullcontext()
    return TracesOfRanks(folder).in_use()
