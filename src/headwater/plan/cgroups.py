"""What the containers around this process leave it of the memory: limits of control groups, v1 and v2."""

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
    """Names of the files of one version that say how much memory a group has, and takes."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str  # in memory.stat


_FILES = {
    1: Usage(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: Usage(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def memory_room(root: Path = Path("/")) -> int | None:
    """Bytes that this process may take before a control group around it runs full; `None` without a limit.

    Args:
        root: where the file system is looked at, for tests.
    """
    proc = root / "proc/self"
    try:
        groups = memory_groups((proc / "cgroup").read_text(), (proc / "mountinfo").read_text())
    except OSError:  # not Linux, or without /proc
        return None
    rooms = [room for group in groups for room in _rooms(root, group)]
    return min(rooms, default=None)


def memory_groups(cgroup: str, mountinfo: str) -> list[Group]:
    """The groups that limit the memory of a process.

    Args:
        cgroup: text of `/proc/self/cgroup`: lines `number:controllers:path`.
        mountinfo: text of `/proc/self/mountinfo`; see `man 5 proc`.
    """
    paths = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
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
    """(version, which part of the hierarchy, where) of each mount that limits memory."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version == 2 or (version == 1 and "memory" in options.split(",")):
            yield version, _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)


def _below(mounted: str, path: str) -> PurePosixPath:
    """`path` relative to what is mounted; a container may see its own group as the root."""
    whole = PurePosixPath(path)
    return whole.relative_to(mounted) if whole.is_relative_to(mounted) else PurePosixPath()


def _rooms(root: Path, group: Group) -> Iterator[int]:
    """What each level of the hierarchy that has a limit leaves."""
    files = _FILES[group.version]
    mount = _inside(root, group.mount)
    folder = _inside(root, group.folder)
    for level in (folder, *folder.parents):
        limits = [limit for name in files.limits if (limit := _number(level / name)) is not None]
        used = _number(level / files.used)
        if limits and used is not None:
            yield max(0, min(limits) - used + _reclaimable(level / "memory.stat", files.reclaimable))
        if level == mount:
            return


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _number(path: Path) -> int | None:
    """What a file says; `None` where there is none, or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path, name: str) -> int:
    """Bytes of cached files, which the kernel gives up before it refuses memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(count) for key, _, count in map(_partition, lines) if key == name), 0)


def _partition(line: str) -> tuple[str, str, str]:
    return line.partition(" ")
