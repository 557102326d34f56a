"""Resources that execute tasks one after the other, and the times of the tasks.

Every resource executes tasks in the order in which they are added, like a GPU stream, a process group or a
thread. A task begins when its dependencies have ended and its resources have finished all earlier tasks. All
times are computed by maxima and sums alone. So a task that takes longer never makes another one end earlier.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence


class Kind(enum.Enum):
    """The purpose of a task."""

    COMPUTE = "compute"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    UPDATE = "update"
    DISK = "disk"
    OFFLOAD = "offload"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A piece of work in the simulation, and when it runs.

    Attributes:
        kind: its purpose.
        name: what it does, for people.
        stage: index of the stage; -1 if it belongs to no stage.
        start_s: seconds from the beginning of the step.
        end_s: seconds from the beginning of the step.
        resources: the resources that it occupies.
        num_bytes: bytes that cross each of its resources, if these carry bytes.
        bound_by: the task at whose end it began; -1 if it began with the step.
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
    """Tasks in the order in which they were added, and the resources that execute them."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.resources: list[tuple[str, str]] = []
        self._last: list[int] = []

    def resource(self, place: str, name: str) -> int:
        """Add a resource of a machine; return its number."""
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
        """Add a task to its resources; return its number.

        Args:
            kind: its purpose.
            name: what it does.
            stage: index of the stage, or -1.
            seconds: its duration.
            resources: the resources that it occupies; without any it only waits.
            after: tasks that must have ended before it.
            num_bytes: bytes that cross each of its resources.
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
        """The time at which all tasks have ended."""
        return max((task.end_s for task in self.tasks), default=0.0)

    @property
    def last(self) -> int:
        """The task that ends last; -1 before the first task was added."""
        return max(range(len(self.tasks)), key=lambda number: self.tasks[number].end_s, default=-1)

    def of(self, resource: int) -> list[int]:
        """Return the tasks of a resource, in the order in which they were added."""
        return [number for number, task in enumerate(self.tasks) if resource in task.resources]

    def bytes_over(self, resource: int) -> float:
        """Return the bytes that cross a resource."""
        return sum(self.tasks[number].num_bytes for number in self.of(resource))
