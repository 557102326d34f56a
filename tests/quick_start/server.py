"""The server that forks processes: `python server.py SOCKET`; see [Note: quick starts]."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import pkgutil
import platform
import runpy
import signal
import socket
import sys
import threading
import time
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, _HERE)
import known_command_traces  # noqa: E402
from quick_start.client import SERVER, Client, use  # noqa: E402
from quick_start.command import Program  # noqa: E402
from quick_start.pictures import NO_PICTURES, leave_pictures_out  # noqa: E402

sys.path.remove(_HERE)

_PACKAGES = (
    "api",
    "convert",
    "data",
    "models",
    "sparsity",
    "cli",
    "config",
    "core",
    "fabric",
    "fabric.launch",
    "optim",
    "plan",
    "store",
    "stream",
    "trainer",
)
_MODULES = (
    *("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch.distributed.run"),
    *("multiprocessing.spawn", "h5py", "torch.utils.tensorboard"),
)
_LEFT_OUT = ("headwater.fabric.launch.ray", "headwater.cli.ray", "headwater.cli.demo")

_CHOOSE_KERNELS = ("HEADWATER_NATIVE", "CC", "CXX", "HOME", "XDG_CACHE_HOME")
"""Environment variables on which it depends which native kernels a process uses."""

_CLONE_PARENT, _CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x8000, 0x1000000, 0x200000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_TID_ADDRESS = 1, 15, 40
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_LIBC = ctypes.PyDLL(None, use_errno=True)


def preload() -> None:
    """Import what most processes need, and check params and the kernel of Adam, as each process would."""
    for package in _PACKAGES:
        found = importlib.import_module(f"headwater.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
            if module.name not in _LEFT_OUT:
                importlib.import_module(module.name)
    for name in _MODULES:
        importlib.import_module(name)
    _build_sections(sys.modules["headwater.config.base"].Section)
    _check_kernel()
    # At the end of a process torch removes its operators and lists its compilations, which takes 0.1 s.
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    gc.collect()
    gc.freeze()
    end_s = time.monotonic() + 10
    while len(list(Path("/proc/self/task").iterdir())) > 1:  # a thread that was joined ends a moment later
        assert time.monotonic() < end_s, "a fork of a process with threads may stand still"
        time.sleep(0.001)


def _build_sections(section: Any) -> None:
    """Build the checks of a section of params files and of its subclasses, which takes 0.2 s of each fork."""
    section.model_rebuild()
    for subclass in section.__subclasses__():
        _build_sections(subclass)


def _check_kernel() -> None:
    """Check the native kernel of Adam; forks use the result, which takes 0.4 s of a slow core."""
    if importlib.import_module("headwater.store.native_check").checked_adam() is None:
        _forget_kernels()  # so that each process logs the reason


def _forget_kernels() -> None:
    importlib.import_module("headwater.core.native")._loaded_once.cache_clear()
    importlib.import_module("headwater.store.native_check")._checked_once.cache_clear()


def _clone_as_sibling() -> int:
    """Fork a child of this process's parent; returns its id, or 0 in it."""
    address = ctypes.c_void_p()
    _LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    flags, thread = signal.SIGCHLD | _CLONE_PARENT, ctypes.c_void_p(0)
    if address.value:  # glibc keeps the id of the thread there
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
        thread = address
    zero = ctypes.c_void_p(0)
    last = (thread, zero) if platform.machine() == "x86_64" else (zero, thread)
    ctypes.pythonapi.PyOS_BeforeFork()
    process = _LIBC.syscall(ctypes.c_long(_CLONE), ctypes.c_ulong(flags), zero, zero, *last)
    if process == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    assert process >= 0, f"clone: {os.strerror(ctypes.get_errno())}"
    return process


def serve(connection: socket.socket) -> Program:
    """Fork processes until the client ends; returns in each of them what it has to run."""
    _LIBC.prctl(_PR_SET_NAME, SERVER.encode(), 0, 0, 0)
    os.setpgid(0, 0)  # signals to the group of the client are not for the server
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, 250)
        if len(head) < 8:
            os._exit(0)
        content = bytearray()
        while len(content) < int.from_bytes(head, "little"):
            piece = connection.recv(1 << 20)
            if not piece:  # the client was killed while it sent; without an exit this loop would spin
                os._exit(0)
            content += piece
        process = _clone_as_sibling()
        if process == 0:
            return _become(pickle.loads(content), files, connection)
        for file in files:
            os.close(file)
        connection.sendall(process.to_bytes(8, "little"))


def _become(request: dict[str, Any], files: list[int], connection: socket.socket) -> Program:
    """Make this fork what a new interpreter would be."""
    connection.close()
    if request["new_session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])
    if request["program"].network:
        _enter_network(request["program"].network)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # This frame ends in each fork of this server. There a socket that is not closed would close its
        # number, which may then be that of a file of the new process.
        ours.close()
        _close_all_but({theirs.fileno()})
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        return serve(theirs)
    theirs.close()
    ours = _placed(dict(zip(request["files"], files, strict=True)), ours)
    read = dict(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    if any(read.get(name) != os.environ.get(name) for name in _CHOOSE_KERNELS):
        _forget_kernels()
    os.chdir(request["folder"])
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    _LIBC.prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    _set_signals(request["ignored"])
    use(Client(read, ours))
    _set_threads(read, request["environment"], len(request["cores"]))
    _set_interpreter(request["program"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return request["program"]


def _enter_network(name: str) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    with Path("/run/netns", name).open("rb") as file:
        assert _LIBC.setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _placed(files: dict[int, int], ours: socket.socket) -> socket.socket:
    """Give the open files their numbers, and close all others; returns the socket, moved above them."""
    import fcntl

    above = max(*files, 2) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    client = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, max(above, 200)))
    ours.close()
    for number, file in moved.items():
        os.dup2(file, number)
    _close_all_but({*files, client.fileno()})
    return client


def _set_signals(ignored: list[int]) -> None:
    """Set the handlers that an interpreter has at its start."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in (signal.SIGPIPE, signal.SIGXFSZ, *ignored):
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _close_all_but(kept: set[int]) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing is closed already
                os.close(int(path.name))


def _set_threads(read: dict[str, str], environment: dict[str, str], cores: int) -> None:
    """Give torch the threads that it would take from the environment when it is loaded."""
    import numpy as np
    import torch

    np.random.seed()
    name = "OMP_NUM_THREADS"
    if name not in environment or environment[name] != read.get(name):
        torch.set_num_threads(int(environment.get(name) or cores))


def _set_interpreter(program: Program) -> None:
    """Set the state of the interpreter that follows from its command line and its environment."""
    unbuffered = program.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8"
    )
    raw = io.FileIO(1, "wb", closefd=False)
    output = raw if unbuffered else io.BufferedWriter(raw)
    terminal = output.isatty()
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        output, encoding="utf-8", line_buffering=terminal, write_through=unbuffered
    )
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    sys.orig_argv = list(program.original)
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path if path not in _PYTHONPATH)]
    if not program.safe_path and not os.environ.get("PYTHONSAFEPATH"):
        first = {"code": "", "module": str(Path.cwd()), "file": str(Path(program.text).resolve().parent)}
        sys.path.insert(0, first[program.kind])
    first_word = {"code": "-c", "module": "-m", "file": program.text}[program.kind]
    sys.argv = [first_word, *program.arguments]


_PYTHONPATH = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run(program: Program) -> int:
    """Run a program as `__main__`; returns the exit code."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if NO_PICTURES in os.environ:
        leave_pictures_out()
    if known_command_traces.FOLDER in os.environ:
        known_command_traces.share_traces(Path(os.environ[known_command_traces.FOLDER]))
    if "HEADWATER_SCRIPT" in os.environ:
        _begin_at_import()
    if program.kind == "module":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            _, spec, code = runpy._get_module_details(program.text)
        sys.argv[0] = spec.origin
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        main.__loader__ = spec.loader
    elif program.kind == "file":
        main.__file__ = program.text
        code = compile(Path(program.text).read_bytes(), program.text, "exec")
    else:
        code = compile(program.text, "<string>", "exec")
    return _execute(code, main.__dict__)


def _execute(code: types.CodeType, names: dict[str, Any]) -> int:
    """Execute code; returns the exit code. An error is shown without what is above it."""
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 an interpreter shows every error
        trace = error.__traceback__.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End this process as an interpreter does, but keep its modules: their removal takes half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # None, or closed
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _begin_at_import() -> None:
    """Run at the first import of Headwater what that import runs in a rank of a script."""
    import builtins

    original = builtins.__import__

    def first(name, *args, **kwargs):
        if name.partition(".")[0] == "headwater":
            builtins.__import__ = original
            importlib.import_module("headwater.fabric.launch.script").begin()
        return original(name, *args, **kwargs)

    builtins.__import__ = first


if __name__ == "__main__":
    faulthandler.disable()  # each fork turns it on if its environment asks for it
    preload()
    end(run(serve(socket.socket(fileno=int(sys.argv[1])))))
