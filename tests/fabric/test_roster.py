"""The ranks of a run by number: hosts, leaders, and names for messages."""

import pytest

from headwater.core.placement import Placement
from headwater.fabric.rendezvous import Process
from headwater.fabric.roster import Roster


def roster(rank, *hosts):
    processes = tuple(Process(host, pid, 0) for pid, host in enumerate(hosts, start=100))
    return Roster(rank, Placement(len(hosts)), processes)


def test_ranks_are_grouped_by_host():
    found = roster(3, "a", "a", "b", "b", "c")
    assert (found.hosts, found.host, found.leaders) == ([0, 0, 1, 1, 2], 1, [0, 2, 4])
    assert {rank: process.pid for rank, process in found.neighbours.items()} == {2: 102, 3: 103}


@pytest.mark.parametrize(
    ("hosts", "others"),
    [
        (("a", "a"), "the others"),
        (("a", "b", "b"), "b, ranks 1 to 2"),
        (("a", "b", "c"), "b, rank 1 or c, rank 2"),
    ],
)
def test_messages_name_the_other_hosts_with_their_ranks(hosts, others):
    assert roster(0, *hosts).others() == others
