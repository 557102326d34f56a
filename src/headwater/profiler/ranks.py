"""The profiles of several ranks: their times side by side, and their traces on one clock."""

from __future__ import annotations

import json
import statistics
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from headwater.profiler.chrome import joined_trace, rank_events
from headwater.profiler.files import write_profile
from headwater.profiler.summary import Summary, of_all_ranks
from headwater.profiler.tables import print_tables

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from headwater.fabric.fabric import Fabric
    from headwater.profiler.profile import Profile

_ROUNDS = 9


def report(fabric: Fabric, profile: Profile, folder: Path, console: Console | None) -> None:
    """Print the tables of the slowest rank, and write all files, on rank 0. All ranks call this.

    Args:
        fabric: the ranks; `ALONE` to report the profile of this rank alone.
        profile: the profile of this rank.
        folder: folder of the files; made if missing.
        console: where rank 0 prints; `None` to print nothing.
    """
    trace = trace_of_ranks(fabric, profile)
    summaries = fabric.gather_objects(profile.summary, Summary)
    if fabric.rank != 0:
        return
    if console is not None:
        print_tables(console, of_all_ranks(summaries), fabric.size)
    write_profile(folder, profile, summaries, trace)


def clock_offsets(fabric: Fabric) -> list[int]:
    """Return for each rank the ns to add to its clock to get that of rank 0. All ranks call this.

    Processes of one host have the same clock. Hosts read their clocks right after a barrier, several times;
    the median of the differences counts.
    """
    rounds = []
    for _ in range(_ROUNDS if fabric.num_hosts > 1 else 0):
        fabric.barrier("the clocks of all ranks")
        rounds.append(fabric.gather(float(perf_counter_ns())))
    return offsets_of(rounds, list(fabric.hosts))


def offsets_of(rounds: list[list[float]], hosts: list[int]) -> list[int]:
    """Return the offset of each rank's clock to that of rank 0.

    Args:
        rounds: the clocks of all ranks, read at nearly the same time, several times.
        hosts: host of each rank.
    """
    leaders = [hosts.index(host) for host in hosts]
    return [
        0 if not leader else int(statistics.median(clocks[0] - clocks[leader] for clocks in rounds))
        for leader in leaders
    ]


def trace_of_ranks(fabric: Fabric, profile: Profile) -> dict[str, Any]:
    """Return the trace of all ranks, on every rank. All ranks call this.

    Args:
        fabric: the ranks.
        profile: the profile of this rank.
    """
    shift = clock_offsets(fabric)[fabric.rank] - int(fabric.gather(float(profile.spans[0][0]))[0])
    name = "Headwater" if fabric.size == 1 else f"rank {fabric.rank}"
    own = json.dumps(rank_events(profile, fabric.rank + 1, name, shift))
    return joined_trace([json.loads(each) for each in fabric.gather_objects(own, str)])
