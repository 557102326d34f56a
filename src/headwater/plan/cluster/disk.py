"""A disk as a resource: it reads or writes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Disk


class DiskQueue:
    """The disk of a host.

    Args:
        timeline: of the step.
        place: the host.
        disk: its rates; `None` where there is none, and nothing is read or written.
    """

    def __init__(self, timeline: Timeline, place: str, disk: Disk | None) -> None:
        self._timeline = timeline
        self._disk = disk
        self._resource = timeline.resource(place, "disk") if disk is not None else -1

    def read(
        self, name: str, stage: int, num_bytes: float, after: Sequence[int], kind: Kind = Kind.DISK
    ) -> int:
        """Read; returns the task."""
        assert self._disk is not None, "what reads has a disk"
        seconds = num_bytes / self._disk.read_bytes_per_s
        return self._timeline.add(kind, name, stage, seconds, (self._resource,), after, num_bytes)

    def write(
        self, name: str, stage: int, num_bytes: float, after: Sequence[int], kind: Kind = Kind.DISK
    ) -> int:
        """Write; returns the task."""
        assert self._disk is not None, "what writes has a disk"
        seconds = num_bytes / self._disk.write_bytes_per_s
        return self._timeline.add(kind, name, stage, seconds, (self._resource,), after, num_bytes)
