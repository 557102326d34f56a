"""The rendezvous of this process with the other ranks of its run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch.distributed

from headwater.core.cleanup import on_failure
from headwater.core.errors import ConfigError, RankError
from headwater.core.placement import Placement
from headwater.fabric import slurm
from headwater.fabric.fabric import ALONE, DEFAULT_TIMEOUT_S, Fabric
from headwater.fabric.membership import joined
from headwater.fabric.parent import end_with_parent
from headwater.fabric.processes import ProcessFabric
from headwater.fabric.rendezvous import Process, meet
from headwater.fabric.report import ERROR_FILE
from headwater.fabric.roster import Roster
from headwater.fabric.torch_group import start_group


def is_rank() -> bool:
    """True if a launcher, `torchrun` or `srun`, has started this process as one rank of several."""
    if slurm.is_task(os.environ):
        os.environ.update(slurm.as_rank(os.environ))
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_watched() -> bool:
    """True if a launcher has started this process, even as its only rank, and waits for its end."""
    return is_rank() or ERROR_FILE in os.environ


def join(timeout_s: float = DEFAULT_TIMEOUT_S, num_memx: int = 0) -> Fabric:
    """Connect to the other ranks of this run at the first call. Return the ranks as a `Fabric`.

    Args:
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.

    Raises:
        ConfigError: if all ranks would be store ranks.
        RankError: if ranks cannot be reached, or the ranks of a host are not numbered consecutively.
    """
    if is_watched():
        end_with_parent()
    # There is one rendezvous. In a second one this rank would wait for ranks that have met in the first.
    if joined.value is ALONE and is_rank():
        joined.value = join_ranks(timeout_s, num_memx)
    return joined.value


def join_ranks(timeout_s: float = DEFAULT_TIMEOUT_S, num_memx: int = 0) -> Fabric:
    """Connect to the other ranks that a launcher has started, and return all ranks as a `Fabric`.

    Args:
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.

    Returns:
        The ranks of the run; this process is one of them.

    Raises:
        ConfigError: if all ranks would be store ranks.
        RankError: if ranks cannot be reached, or the ranks of a host are not numbered consecutively.
    """
    # A short timeout is not used for the rendezvous, because another rank may still be measuring the machine.
    patience_s = max(timeout_s, DEFAULT_TIMEOUT_S)
    own = Process(host_name(), os.getpid(), os.memfd_create("headwater"))
    switchboard, processes = meet(own, patience_s)
    with on_failure(switchboard.close):
        # These checks come after the rendezvous, so that all ranks raise the same error.
        placement = _placement(len(processes), num_memx)
        _check_order([process.host for process in processes])
        # If the script has made a process group, it keeps this group.
        if not torch.distributed.is_initialized():
            start_group(switchboard, placement.size, patience_s)
        return ProcessFabric(switchboard, Roster(switchboard.rank, placement, tuple(processes)), timeout_s)


def _placement(size: int, num_memx: int) -> Placement:
    if num_memx >= size:
        raise ConfigError(
            f"num_memx={num_memx}, but {size} ranks were started, so no rank is left to compute",
            where="num_memx",
            remedy=f"start at least {num_memx + 1} ranks: num_csx + num_memx is their number",
        )
    return Placement(size - num_memx, num_memx)


def _check_order(hosts: Sequence[str]) -> None:
    """Raise `RankError` if the ranks of a host are not numbered consecutively."""
    if any(a != b and b in hosts[:i] for i, (a, b) in enumerate(itertools.pairwise(hosts), 1)):
        raise RankError(
            f"expected consecutive rank numbers on each host, got hosts by rank: {', '.join(hosts)}",
            remedy="start the ranks host by host, as torchrun does; with srun: --distribution=block",
        )


def host_name() -> str:
    """Return the name of this host: the machine's name, and the launcher's node if it has started several."""
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID"))
    return os.uname().nodename if node is None else f"{os.uname().nodename} (node {node})"
