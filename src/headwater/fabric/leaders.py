"""Links between hosts: one rank of each host, its leader, talks to the other leaders."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt
import torch

from headwater.fabric.link import Link
from headwater.fabric.messages import new_mesh
from headwater.fabric.roster import Roster
from headwater.fabric.switchboard import Switchboard

if TYPE_CHECKING:
    from headwater.fabric.host import HostGroup


@final
class Leaders:
    """The links of this rank's host to the other hosts. All ranks make the same calls.

    Args:
        switchboard: the connections of this rank.
        roster: the ranks.
        host: the ranks of this host.
        timeout_s: seconds to wait for another host before an error is raised.
    """

    def __init__(self, switchboard: Switchboard, roster: Roster, host: HostGroup, timeout_s: float) -> None:
        self._switchboard = switchboard
        self._roster = roster
        self._host = host
        self._timeout_s = timeout_s
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._control = self.connect("control messages")

    def connect(self, purpose: str) -> Link | None:
        """Return a new link; `None` on a rank that is not a leader. See `Fabric.connect`."""
        roster = self._roster
        # Ranks that are not leaders make this call too: the number of calls becomes the name of the mesh.
        mesh = new_mesh(self._switchboard, roster.leaders, self._timeout_s)
        if roster.rank not in roster.leaders:
            return None
        names = [roster.name(host) for host in range(len(roster.host_names))]
        link = Link(purpose, mesh, names, roster.host, self._host.note_call)
        self._links.add(link)
        return link

    def meet(self) -> None:
        """Block until the leaders of all hosts have called this. Other ranks return at once."""
        if self._control is not None:
            self._control.gather(torch.zeros(1, device="cpu"))

    def share(self, values: npt.NDArray[np.float64]) -> None:
        """Copy to `values` the values that the ranks of other hosts have written on their own hosts.

        All leaders make this call; on other ranks it does nothing.

        Args:
            values: one value of each rank of the run, by rank.
        """
        if self._control is not None:
            # A copy is sent, because the ranks of this host may write to `values` meanwhile.
            every = self._control.gather(torch.from_numpy(values.copy()))
            for rank, host in enumerate(self._roster.hosts):
                values[rank] = every[host, rank]

    def close(self) -> None:
        """Close the links."""
        for link in list(self._links):
            link.close()
