"""Hosts of one rank each, which are threads of one process."""

import threading

import torch
from thread_fabric import ThreadFabric, _Shared, ranks

from headwater.fabric.fabric import Fabric


class _Meeting:
    """A place where the hosts exchange values for one purpose."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size


class ThreadLink:
    """A connection between hosts that are threads."""

    def __init__(self, host, meeting):
        self.host, self.num_hosts = host, len(meeting.values)
        self._meeting = meeting
        self.is_closed = False

    def _all(self, value):
        self._meeting.values[self.host] = value
        self._meeting.barrier.wait(200)
        values = list(self._meeting.values)
        self._meeting.barrier.wait(200)
        return values

    def gather(self, values):
        return torch.stack(self._all(values.clone()))

    def exchange(self, out, into):
        self.start_exchange(out, into)()

    def start_exchange(self, out, into):
        every = self._all([each.clone() for each in out])
        for host, theirs in enumerate(every):
            if host != self.host:
                into[host].copy_(theirs[self.host])
        return lambda: None

    def close(self):
        self.is_closed = True


class ThreadHost(ThreadFabric):
    """A host of one rank that is a thread; `hosts` starts them."""

    def __init__(self, rank, size, shared, meetings):
        super().__init__(rank, size, shared)
        self.local_rank, self.local_size, self.hosts = 0, 1, range(size)
        self._own = ThreadFabric(0, 1, _Shared(1))
        self._meetings, self._size = meetings, size
        self.links = []

    @property
    def neighbours(self) -> Fabric:
        """This rank alone, which waits for its own threads."""
        return self._own

    def allocate(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def connect(self, purpose):
        self.links.append(ThreadLink(self.rank, self._meetings.setdefault(purpose, _Meeting(self._size))))
        return self.links[-1]


def hosts(size, program):
    """Return the results of `program` on each of these hosts."""
    meetings = {}
    return ranks(size, lambda fabric: program(ThreadHost(fabric.rank, size, fabric._shared, meetings)))
