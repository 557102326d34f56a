"""Memory limits of the control groups (v1 and v2) around this process, such as those of containers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class Group(NamedTuple):
    """A control group that limits memory.

    Attributes:
        mount: where its hierarchy is mounted.
        folder: its own folder, at or below `mount`.
        version: 1 or 2.
    """

    mount: Path
    folder: Path
    version: int


class Usage(NamedTuple):
    """Names of the files of one version that hold the memory limits and the memory use of a group."""

    limits: tuple[str, ...]
    used: str
    inactive: str  # name of a line in memory.stat
    active: str


_FILES = {
    # `total_` includes the groups below, as `usage_in_bytes` does. Above `memory.high` the kernel kills no
    # process, but slows all of them down.
    1: Usage(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    2: Usage(("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file"),
}


class Level(NamedTuple):
    """One level of a hierarchy of control groups that limits memory, in bytes.

    Attributes:
        limit: memory that the processes of the group may take together.
        used: memory that they take, without the cached files that the kernel frees first.
        held: memory that they take, without any cached files. The kernel can free all of these.
    """

    limit: int
    used: int
    held: int

    @property
    def room(self) -> int:
        """Bytes that the group may still take."""
        return max(0, self.limit - self.used)


def memory_room(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may take before a control group is full; `None` without a limit.

    Args:
        root: root of the file system, for tests.
    """
    return min((level.room for level in memory_levels(root)), default=None)


def memory_levels(root: Path = Path("/")) -> list[Level]:
    """Return the control groups around this process that have a memory limit."""
    proc = root / "proc/self"
    try:
        groups = memory_groups((proc / "cgroup").read_text(), (proc / "mountinfo").read_text())
    except OSError:  # not Linux, or without /proc
        return []
    return [level for group in groups for level in _levels(root, group)]


def memory_groups(cgroup: str, mountinfo: str) -> list[Group]:
    """Return the groups that limit the memory of a process.

    Args:
        cgroup: text of `/proc/self/cgroup`: lines `number:controllers:path`.
        mountinfo: text of `/proc/self/mountinfo`; see `man 5 proc`.
    """
    paths = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)  # the path may contain colons
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    found = []
    for version, mounted, mount in _mounts(mountinfo):
        if version in paths:
            found.append(Group(mount, mount / _below(mounted, paths[version]), version))
    return found


def _mounts(mountinfo: str) -> Iterator[tuple[int, str, Path]]:
    """Yield (version, mounted part of the hierarchy, mount point) of each mount that limits memory."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")  # the number of fields before the dash varies
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version == 2 or (version == 1 and "memory" in options.split(",")):
            yield version, _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)


def _below(mounted: str, path: str) -> PurePosixPath:
    """Return `path` relative to the mounted part. A container may see its own group as the root."""
    whole = PurePosixPath(path)
    return whole.relative_to(mounted) if whole.is_relative_to(mounted) else PurePosixPath()


def _levels(root: Path, group: Group) -> Iterator[Level]:
    """Yield each level of the hierarchy that has a limit."""
    files = _FILES[group.version]
    mount = _inside(root, group.mount)
    folder = _inside(root, group.folder)
    for level in (folder, *folder.parents):
        limits = [limit for name in files.limits if (limit := _number(level / name)) is not None]
        used = _number(level / files.used)
        if limits and used is not None:
            cached = _statistics(level / "memory.stat")
            used -= cached.get(files.inactive, 0)
            yield Level(min(limits), used, used - cached.get(files.active, 0))
        if level == mount:
            return


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _number(path: Path) -> int | None:
    """Return the number in a file; `None` if the file does not exist, or holds `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistics(path: Path) -> dict[str, int]:
    """Return the lines `name bytes` of a file; nothing if the file does not exist."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(" ", 1) for line in lines if " " in line)
    return {name: int(count) for name, count in pairs if count.isdigit()}
