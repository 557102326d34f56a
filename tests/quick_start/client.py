"""The side that asks for processes; see [Note: quick starts]. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from quick_start.command import Program, parse

HERE = Path(__file__).resolve().parent
SITE = HERE / "site"
"""A folder for PYTHONPATH. With it, and with `NO_PICTURES`, an interpreter draws no loss curve."""

HANDED_OVER = "HEADWATER_QUICK_START"
"""Environment variable: the open file of the server, and PYTHONPATH, of a process that executes a program."""

SERVER = "quick-server"
"""Name of the process of a server."""

_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)
_READ_WHEN_LOADED = (
    "ATEN_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH_LOGS",
)
_SET_LATER = (
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets both when it is imported; torch's OpenMP reads neither
    "KMP_INIT_AT_FORK",
    "GOMP_SPINCOUNT",
    "OMP_NUM_THREADS",
    "PYTHONFAULTHANDLER",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONSAFEPATH",
    "PYTHONDONTWRITEBYTECODE",
)

_all_children = psutil.Process.children
_execute_child = subprocess.Popen._execute_child
_spawn = multiprocessing.util.spawnv_passfds
_execv = os.execv


class Client:
    """The connection of this process with its server.

    Args:
        environment: what the server has or gets.
        connection: to the server; without it the server is started for the first process.

    Attributes:
        process: the process whose children the server starts; its forks have a copy of this object.
        socket: to the server, if it was started.
        session: of the server.
        environment: what libraries have read when the server loaded them.
        limits: of the server.
    """

    def __init__(self, environment: Mapping[str, str], connection: socket.socket | None = None):
        self.process = os.getpid()
        self.socket = connection
        self.session = os.getsid(0)
        self.environment = _read_when_loaded(environment)
        self._of_server = dict(environment)
        self._server: subprocess.Popen[bytes] | None = None
        self.limits = [resource.getrlimit(kind) for kind in _LIMITS]
        self._lock = threading.Lock()

    def accepts(self, environment: Mapping[str, str], *, new_session: bool) -> bool:
        """Return whether a fork of the server equals a real start."""
        return (
            self.process == os.getpid()
            and (new_session or os.getsid(0) == self.session)
            and _read_when_loaded(environment) == self.environment
            and [resource.getrlimit(kind) for kind in _LIMITS] == self.limits
        )

    def start(
        self, program: Program, environment: Mapping[str, str], files: Mapping[int, int], **own: Any
    ) -> int:
        """Return the id of a new process.

        Args:
            program: what it runs.
            environment: all its variables.
            files: its open files; the number there, and here.
            own: `folder`, `new_session`, `group` and `umask`, where they are not those of this process.
        """
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        request = {
            "program": program,
            "environment": dict(environment),
            "files": list(files),
            "folder": own.get("folder") or str(Path.cwd()),
            "new_session": own.get("new_session", False),
            "group": own.get("group", os.getpgid(0)),
            "umask": own.get("umask", -1),
            "ignored": [number for number, handler in handlers.items() if handler is signal.SIG_IGN],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "cores": list(os.sched_getaffinity(0)),
        }
        content = pickle.dumps(request)
        with self._lock:
            self.socket = server = self.socket or self._start_server()
            socket.send_fds(server, [len(content).to_bytes(8, "little")], list(files.values()))
            server.sendall(content)
            answer = server.recv(8, socket.MSG_WAITALL)
        assert len(answer) == 8, "the server of quick starts has ended"
        return int.from_bytes(answer, "little")

    def _start_server(self) -> socket.socket:
        """Start the server; returns the connection with it."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(HERE / "server.py"), str(theirs.fileno())]
        # numpy starts threads when it is imported, but a server with threads cannot fork. `_set_threads`
        # gives each new process the number that it would have taken.
        environment = {**self._of_server, "OMP_NUM_THREADS": "1"}
        options = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "env": environment}
        with real_starts():
            self._server = subprocess.Popen(command, **options)
        theirs.close()
        return ours


def with_site(path: str) -> str:
    """Return a value of PYTHONPATH with `SITE` before its other folders."""
    return f"{SITE}:{path}" if path else str(SITE)


def _read_when_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_WHEN_LOADED) and name not in _SET_LATER
    }


_client: Client | None = None
_enabled = True


def use(client: Client) -> None:
    """Start processes through this client from now on."""
    global _client
    _client = client
    subprocess.Popen._execute_child = _start_or_execute
    multiprocessing.util.spawnv_passfds = _start_or_spawn
    os.execv = _hand_over
    psutil.Process.children = _children


def install() -> None:
    """Use a server from now on; it is started for the first process."""
    if not os.environ.get("HEADWATER_REAL_STARTS") and os.uname().machine in ("x86_64", "aarch64"):
        use(Client(os.environ))


@contextlib.contextmanager
def real_starts() -> Iterator[None]:
    """Make the starts within the context real."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def _start_or_execute(
    self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
    p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
    restore_signals, gid, gids, uid, umask, start_new_session, process_group,
):  # fmt: skip
    """`subprocess.Popen._execute_child`, by a fork of the server where that is the same."""
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
    program = parse(words) if all(isinstance(word, str) for word in words) else None
    environment = os.environ if env is None else env
    plain = not (preexec_fn or executable or shell) and close_fds and (gid, gids, uid) == (None, None, None)
    wanted = plain and program is not None and (cwd is None or Path(cwd).is_dir()) and process_group <= 0
    if not (_enabled and wanted and _client and _client.accepts(environment, new_session=start_new_session)):
        return _execute_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
            shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid,
            umask, start_new_session, process_group,
        )  # fmt: skip
    streams = {0: p2cread, 1: c2pwrite, 2: errwrite}
    files = {number: number if here == -1 else here for number, here in streams.items()}
    own = {} if process_group == -1 else {"group": 0}
    self.args = args
    try:
        self.pid = _client.start(
            program,
            {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            files | {number: number for number in pass_fds},
            folder=None if cwd is None else str(Path(os.fsdecode(cwd)).absolute()),
            new_session=start_new_session,
            umask=umask,
            **own,
        )
        self._child_created = True
    finally:
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """`psutil.Process.children` without servers of quick starts, which are neither ranks nor workers."""
    return [child for child in _all_children(process, recursive) if _name(child) != SERVER]


def _name(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def _start_or_spawn(path: bytes, args: Sequence[bytes | str], passfds: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, by a fork of the server for a process that runs a function."""
    words = [os.fsdecode(word) for word in args]
    program = parse(words)
    is_process = program is not None and "spawn_main" in program.text
    if not (_enabled and is_process and _client and _client.accepts(os.environ, new_session=False)):
        return _spawn(path, args, passfds)
    return _client.start(program, dict(os.environ), {number: number for number in (0, 1, 2, *passfds)})


def _hand_over(path: str, args: Sequence[str]) -> None:
    """`os.execv`; the server, a child of this process, stays with the program that takes its place."""
    known = _client is not None and _client.socket is not None and _client.process == os.getpid()
    if _enabled and known and parse(args) is not None:
        os.set_inheritable(_client.socket.fileno(), True)
        before = os.environ.get("PYTHONPATH", "")
        os.environ[HANDED_OVER] = f"{_client.socket.fileno()}:{before}"
        os.environ["PYTHONPATH"] = f"{SITE}:{before}"
    _execv(path, args)


def take_over(handed_over: str) -> None:
    """Use the server of the program in whose place this one was executed."""
    number, _, path = handed_over.partition(":")
    os.environ["PYTHONPATH"] = path
    if not path:
        del os.environ["PYTHONPATH"]
    os.set_inheritable(int(number), False)
    use(Client(os.environ, socket.socket(fileno=int(number))))
