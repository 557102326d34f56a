"""Runs one program without network and without the files of the user. A script of Python's own modules.

The first process stays outside and waits. The second one is process 1 of new namespaces, and prepares their
files. The third one becomes the interpreter that runs the program. `sandbox.py` starts and ends all of them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534
REFUSED = 100
"""Exit code if the kernel refuses a part of the sandbox; stdout then has the reason."""

_NEW_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""`CLONE_NEW…` of mounts, host name, IPC, user, processes and network."""
_BIND, _RECURSIVE, _SLAVE, _NO_SETUID, _NO_DEVICES = 4096, 16384, 1 << 19, 2, 4
_DETACH = 2
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_MOUNT_SETATTR = 442
"""Number of the system call, on every architecture."""
_HERE, _SUBTREE = -100, 0x8000
_ATTRIBUTE_READ_ONLY, _ATTRIBUTE_NO_SETUID, _ATTRIBUTE_NO_DEVICES = 1, 2, 4
_DEVICES = ("null", "zero", "urandom", "random")

_SET_FILTER, _FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of a filter of system calls."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_OTHER_NUMBERS = 0x40000000
"""From here on numbers are those of x32, a second set of the same calls."""
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENT = 0, 4, 16
"""Places in the data that a filter reads."""
_FAMILIES = (1, 2, 10)
"""Families of sockets that belong to a namespace: Unix, IPv4 and IPv6. Those of virtual machines do not."""
_CALLS = {
    "x86_64": (0xC000003E, 41, (29, 101, 248, 249, 250, 272, 298, 308, 321, 323, 425)),
    "aarch64": (0xC00000B7, 198, (194, 117, 217, 218, 219, 97, 241, 268, 280, 282, 425)),
}
"""Name of an architecture -> its mark, the number of `socket`, and the numbers of forbidden calls.

They are shmget, ptrace, add_key, request_key, keyctl, unshare, perf_event_open, setns, bpf, userfaultfd
and io_uring_setup: memory outside of all limits, keys of the user, and vulnerable parts of the kernel.
"""

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """`struct mount_attr` of the kernel."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


class _Instruction(ctypes.Structure):
    """`struct sock_filter` of the kernel."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    """`struct sock_fprog` of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: if it fails.
    """
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    words = (None if word is None else word.encode() for word in (source, target, kind))
    call("mount", *words, ctypes.c_ulong(flags), None if data is None else data.encode())


def make_read_only(path: str, *, subtree: bool) -> None:
    """Make a mount read-only, without devices and without programs that change the user."""
    attributes = _Attributes(_ATTRIBUTE_READ_ONLY | _ATTRIBUTE_NO_SETUID | _ATTRIBUTE_NO_DEVICES, 0, 0, 0)
    call(
        "syscall",
        ctypes.c_long(_MOUNT_SETATTR),
        _HERE,
        path.encode(),
        _SUBTREE if subtree else 0,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def changes_user() -> bool:
    """True if the program can run as another user, because this process is root.

    The kernel does not limit the number of processes of root.
    """
    if os.geteuid() != 0:
        return False
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [[int(word) for word in line.split()] for line in lines]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def enter_namespaces(*, as_root: bool) -> None:
    """Move this process, and the processes that it will start, to new namespaces.

    Raises:
        OSError: if the kernel refuses.
    """
    entered, enter = os.pipe()
    written, write = os.pipe()
    own = os.getpid()
    # The map of users must be written from outside of the new namespace.
    writer = os.fork()
    if writer == 0:
        os.close(enter)
        if os.read(entered, 1):
            os.write(write, _write_maps(own, as_root=as_root).encode() or b"-")
        os._exit(0)
    call("unshare", _NEW_NAMESPACES)
    os.write(enter, b"-")
    answer = os.read(written, 4096).decode()
    os.waitpid(writer, 0)
    for end in (entered, enter, written, write):
        os.close(end)
    if answer != "-":
        raise OSError(0, answer)


def _write_maps(process: int, *, as_root: bool) -> str:
    """Write which users and groups a process's namespace has; return the error, or an empty text."""
    folder = Path(f"/proc/{process}")
    try:
        if not as_root:
            (folder / "setgroups").write_text("deny")
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            text = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if as_root else f"{NOBODY} {own} 1\n"
            (folder / name).write_text(text)
    except OSError as error:
        return f"map of users: {error.strerror}"
    return ""


def enter_files(job: dict[str, Any]) -> None:
    """Replace all files by the job's folders, read-only, and an empty /tmp in memory as working folder."""
    root = str(job["root"])
    mount("none", "/", None, _RECURSIVE | _SLAVE)
    mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    for folder in job["folders"]:
        _show(root, folder)
    (Path(root) / "dev").mkdir()
    for name in _DEVICES:
        target = Path(root, "dev", name)
        target.touch()
        mount(f"/dev/{name}", str(target), None, _BIND)
    scratch = Path(root, "tmp")
    scratch.mkdir(exist_ok=True)
    limits = f"size={job['scratch']},nr_inodes=4096,mode=1777"
    mount("tmpfs", str(scratch), "tmpfs", _NO_SETUID | _NO_DEVICES, limits)
    # A user namespace of the program's own would give it the rights to mount.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    make_read_only(root, subtree=False)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    os.chdir("/tmp")


def _show(root: str, folder: str) -> None:
    """Show a folder of the machine at the same path below `root`."""
    source, target = Path(folder), Path(root + folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir(exist_ok=True)
        mount(folder, str(target), None, _BIND | _RECURSIVE)
        make_read_only(str(target), subtree=True)


def forbid_calls() -> None:
    """Forbid system calls that no program of a task needs, on architectures whose numbers are known."""
    if os.uname().machine not in _CALLS:
        return
    architecture, make_socket, forbidden = _CALLS[os.uname().machine]
    refused = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    steps = [(_LOAD, 0, 0, _AT_ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, _AT_NUMBER), (_AT_LEAST, 0, 1, _OTHER_NUMBERS), refused]
    for number in forbidden:
        steps += [(_EQUAL, 0, 1, number), refused]
    # Past the checks of a socket, unless this is one.
    steps += [(_EQUAL, 0, 2 + 2 * len(_FAMILIES), make_socket), (_LOAD, 0, 0, _AT_ARGUMENT)]
    for family in _FAMILIES:
        steps += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    steps += [refused, (_RETURN, 0, 0, _ALLOW)]
    instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    call("prctl", _SET_FILTER, _FILTER, ctypes.byref(_Filter(len(steps), instructions)), 0, 0)


def become_program(job: dict[str, Any], report: int, *, as_root: bool) -> None:
    """Give up all rights, set the limits, and become the interpreter that runs the program."""
    content = os.memfd_create("program")
    os.write(content, json.dumps(job["content"]).encode())
    os.lseek(content, 0, os.SEEK_SET)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if as_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for end in (content, report):
        os.set_inheritable(end, True)
    forbid_calls()
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    words = [job["python"], "-I", "-S", "-c", job["runner"], str(content), str(report)]
    os.execve(job["python"], words, job["environment"])


def run(job: dict[str, Any], report: int) -> int:
    """Run the program of a job; return its exit code, or 128 + the signal that ended it."""
    end_with_parent()
    Path("/proc/self/oom_score_adj").write_text("1000")
    as_root = changes_user()
    enter_namespaces(as_root=as_root)
    first = os.fork()
    if first == 0:
        with _exit_on_os_error():
            end_with_parent()
            enter_files(job)
            program = os.fork()
            if program == 0:
                with _exit_on_os_error():
                    become_program(job, report, as_root=as_root)
            os.close(report)
            os._exit(_exit_code(program))
    os.close(report)
    return _exit_code(first)


def _exit_code(process: int) -> int:
    """Wait for a process, and for orphans until it ends; return its exit code."""
    while True:
        ended, status = os.wait()
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


class _exit_on_os_error:
    """A context in which an `OSError` is printed and ends the process."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            # The real stdout: the program has another one.
            sys.stdout.write(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
            sys.stdout.flush()
            os._exit(REFUSED)


def main() -> None:
    """Run the job that stdin has as JSON. The argument is the file descriptor for the program's report."""
    with _exit_on_os_error():
        code = run(json.load(sys.stdin), int(sys.argv[1]))
    os._exit(code)


if __name__ == "__main__":
    main()
