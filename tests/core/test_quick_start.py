"""Processes that tests start by a fork behave like those of a new interpreter."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import quick_start
from headwater.core.native import SWITCH
from headwater.store.native_check import checked_adam

SHOW = """
import faulthandler, json, os, signal, sys
# Python does not know the handlers of these signals if they were set before its module was loaded.
fatal = {4, 6, 7, 8, 11} if faulthandler.is_enabled() else set()
shown = {
    "parent": os.getppid(), "argv": sys.argv, "path": sys.path, "original": sys.orig_argv,
    "folder": os.getcwd(), "environment": dict(os.environ), "umask": os.umask(0), "name": __name__,
    "cores": sorted(os.sched_getaffinity(0)), "leads": os.getsid(0) == os.getpid(),
    "group": None if os.getsid(0) == os.getpid() else os.getpgid(0), "input": sys.stdin.read(),
    "signals": {str(number): str(signal.getsignal(number))
                for number in sorted(signal.valid_signals() - fatal)
                if "built-in" not in str(signal.getsignal(number))},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": len(os.listdir("/proc/self/fd")) - ("quick_start.client" in sys.modules),
    "threads": __import__("torch").get_num_threads(), "faults": faulthandler.is_enabled(),
}
print(json.dumps(shown))
"""


def shown(*words, **options):
    done = subprocess.run(
        [sys.executable, *words], input="hello", capture_output=True, text=True, check=True, **options
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["code", "file", "session"])
def test_a_fork_has_the_state_of_a_new_interpreter(kind, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    words = {"code": ["-c", SHOW, "a"], "file": ["show.py", "b"], "session": ["-P", "-c", SHOW]}[kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "NEW": "x"}
    if kind == "file":
        environment["PYTHONFAULTHANDLER"] = "1"
    options = {"cwd": tmp_path, "env": environment, "umask": 0o27, "start_new_session": kind == "session"}
    with quick_start.real_starts():
        expected = shown(*words, **options)
    assert shown(*words, **options) == expected


HANDLED = "import os, signal; signal.signal(2, signal.default_int_handler)"
"""A process in the background of a shell ignores SIGINT otherwise."""


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        (f"{HANDLED}; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
    ],
)
def test_a_fork_ends_as_an_interpreter_does(code, status, error):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.endswith(error)


def test_a_fork_prints_its_stack_at_a_crash_if_its_environment_asks_for_it():
    code = "import os, sys; assert 'torch' in sys.modules; os.abort()"
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("Fatal Python error: Aborted") and 'File "<string>", line 1' in done.stderr


def test_a_program_that_a_fork_executes_is_its_process_and_starts_others():
    inner = "import os, sys, json; print(json.dumps([os.getppid(), 'torch' in sys.modules]))"
    program = (
        "import json, os, subprocess, sys; first = sys.argv[1] == str(os.getpid()), 'torch' in sys.modules;"
        f"inner = subprocess.check_output([sys.executable, '-c', {inner!r}]);"
        "parent, imported = json.loads(inner);"
        "print(json.dumps([*first, parent == os.getpid(), imported]))"
    )
    command = f"[sys.executable, '-P', '-c', {program!r}, str(os.getpid())]"
    outer = f"import os, sys; os.execv(sys.executable, {command})"
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, False, True, True]


CHECKED = "from headwater.store.native_check import _checked_once; print(_checked_once.cache_info().currsize)"


def test_a_fork_knows_the_checked_kernel_unless_its_environment_may_choose_another():
    def known(**variables):
        environment = {**os.environ, **variables}
        return int(subprocess.check_output([sys.executable, "-c", CHECKED], env=environment))

    assert known() == (checked_adam() is not None)
    assert known(**{SWITCH: "0"}) == known(CC="clang") == 0


def test_the_server_ends_when_its_client_dies_in_the_middle_of_a_request():
    ours, theirs = socket.socketpair()
    code = f"import socket, server; server.serve(socket.socket(fileno={theirs.fileno()}))"
    environment = {**os.environ, "PYTHONPATH": str(Path(quick_start.__file__).parent)}
    with quick_start.real_starts(), ours:
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.sendall((100).to_bytes(8, "little") + b"a part of the 100 bytes")
    assert process.wait(60) == 0


@pytest.mark.real_start
@pytest.mark.parametrize("names", [(quick_start.NO_PICTURES,), ()])
def test_an_interpreter_with_the_site_folder_draws_no_pictures(names):
    path = quick_start.with_site(os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": path, **dict.fromkeys(names, "1")}
    code = "import importlib.util as util; print(util.find_spec('matplotlib') is not None)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{not names}\n", done.stderr
