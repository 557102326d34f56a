"""Resources that serve tasks one after the other, and when each task runs.

Every resource serves in the order in which tasks are given to it, as a stream of a GPU, a process group or a
thread does. A task begins as soon as what it waits for has ended and its resources have served everything
before it. All times follow from that by maxima and sums alone, so that nothing ends earlier because something
else takes longer.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence


class Kind(enum.Enum):
    """What a task is for."""

    COMPUTE = "compute"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    UPDATE = "update"
    DISK = "disk"
    OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Something that has its time.

    Attributes:
        kind: what it is for.
        name: what it does, for people.
        stage: index of the stage; -1 where it is of none.
        start_s: seconds from the beginning of the step.
        end_s: likewise.
        resources: what it holds all that time.
        num_bytes: that cross each of its resources, where they carry bytes.
        bound_by: the task whose end it began with; -1 where it began with the step.
    """

    kind: Kind
    name: str
    stage: int
    start_s: float
    end_s: float
    resources: tuple[int, ...]
    num_bytes: float
    bound_by: int


class Timeline:
    """Tasks in the order in which they were given, and the resources that serve them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.resources: list[tuple[str, str]] = []
        self._last: list[int] = []

    def resource(self, place: str, name: str) -> int:
        """A new resource, by the machine it belongs to and its name there."""
        self.resources.append((place, name))
        self._last.append(-1)
        return len(self.resources) - 1

    def add(
        self,
        kind: Kind,
        name: str,
        stage: int,
        seconds: float,
        resources: Sequence[int] = (),
        after: Iterable[int] = (),
        num_bytes: float = 0.0,
    ) -> int:
        """Give a task to its resources; returns its number.

        Args:
            kind: what it is for.
            name: what it does.
            stage: index of the stage, or -1.
            seconds: how long it takes.
            resources: what it holds; without any it only waits.
            after: tasks that must have ended.
            num_bytes: that cross each of its resources.
        """
        tasks, last = self.tasks, self._last
        start, bound_by = 0.0, -1
        for task in after:
            if tasks[task].end_s > start:
                start, bound_by = tasks[task].end_s, task
        for resource in resources:
            task = last[resource]
            if task >= 0 and tasks[task].end_s > start:
                start, bound_by = tasks[task].end_s, task
        number = len(tasks)
        tasks.append(Task(kind, name, stage, start, start + seconds, tuple(resources), num_bytes, bound_by))
        for resource in resources:
            last[resource] = number
        return number

    @property
    def end_s(self) -> float:
        """When everything has ended."""
        return max((task.end_s for task in self.tasks), default=0.0)

    @property
    def last(self) -> int:
        """The task that ends last; -1 where there is none."""
        return max(range(len(self.tasks)), key=lambda number: self.tasks[number].end_s, default=-1)

    def of(self, resource: int) -> list[int]:
        """The tasks of a resource, in order."""
        return [number for number, task in enumerate(self.tasks) if resource in task.resources]

    def bytes_over(self, resource: int) -> float:
        """Bytes that cross a resource."""
        return sum(self.tasks[number].num_bytes for number in self.of(resource))
