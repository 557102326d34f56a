"""A disk as a resource, which executes reads and writes one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Disk


class DiskQueue:
    """The disk of a host.

    Args:
        timeline: the timeline of the step.
        place: the host.
        disk: its rates; `None` if the host has no disk, and nothing is read or written.
    """

    def __init__(self, timeline: Timeline, place: str, disk: Disk | None) -> None:
        self._timeline = timeline
        self._disk = disk
        # Reads and writes share one resource, because they slow each other down if they overlap.
        self._resource = timeline.resource(place, "disk") if disk is not None else -1

    def read(
        self, name: str, stage: int, num_bytes: float, after: Sequence[int], kind: Kind = Kind.DISK
    ) -> int:
        """Add a read; return the number of its task."""
        assert self._disk is not None, "only a host with a disk reads from it"
        seconds = num_bytes / self._disk.read_bytes_per_s
        return self._timeline.add(kind, name, stage, seconds, (self._resource,), after, num_bytes)

    def write(
        self, name: str, stage: int, num_bytes: float, after: Sequence[int], kind: Kind = Kind.DISK
    ) -> int:
        """Add a write; return the number of its task."""
        assert self._disk is not None, "only a host with a disk writes to it"
        seconds = num_bytes / self._disk.write_bytes_per_s
        return self._timeline.add(kind, name, stage, seconds, (self._resource,), after, num_bytes)
