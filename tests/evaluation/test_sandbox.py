"""Hostile programs in the sandbox: what they can reach, and that nothing of them is left."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from headwater.evaluation.sandbox import ProgramLimits, Sandbox

USUAL, SOON = ProgramLimits(seconds=60.0), ProgramLimits(seconds=1.0)
"""The first is enough on a slow machine. The second is for programs that use all their time."""


@pytest.fixture(scope="module")
def run():
    """Runs a program, with `NAME` replaced by values, and returns the outcome."""

    def run(program, limits=USUAL, **values):
        text = textwrap.dedent(program)
        for name, value in values.items():
            text = text.replace(name, repr(value))
        return Sandbox(limits).run(text)

    return run


def living(marker):
    """Return the ids of processes of this machine whose command line has a word."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            pass
    return found


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted([2, 1]) == [1, 2]",
        "import math, json, typing, dataclasses, re",
        "import numpy\nassert numpy.ones(3).sum() == 3",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\nassert A(1) == A(1)",
        "open('own.txt', 'w').write('x')\nassert open('own.txt').read() == 'x'",
        "print('x' * 10_000_000)",
        "import threading\nthreading.Thread(target=__import__('time').sleep, args=(1000,)).start()",
    ],
)
def test_a_program_that_runs_to_its_end_has_passed(run, program):
    assert run(program).result == "passed"


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("assert 1 == 2", "failed: AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise ValueError('no')", "failed: ValueError: no"),
        ("input()", "EOFError"),
        ("import sys\nassert sys.stdin.read() == ''\nsys.stdin.read(1)[0]", "IndexError"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("open('x', 'wb').write(bytes(17 << 20))", "failed: "),
        ("for n in range(9): open(str(n), 'wb').write(bytes(10 << 20))", "No space left"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)", "failed: "),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
        (
            "import os\nos.write(2, b'KeyError\\nTraceback (most recent call last):\\n  File')\nos._exit(1)",
            "failed: KeyError",
        ),
    ],
)
def test_a_program_that_fails_has_the_reason(run, program, result):
    outcome = run(program)
    assert not outcome.passed and result in outcome.result


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "quit()",
        "import os\nos.closerange(0, 1000)\nos._exit(0)",
        "import os\nif os.fork():\n    os._exit(0)",
        "import os\nfor end in range(1000):\n    try: os.write(end, b'passed')\n"
        "    except OSError: pass\nos._exit(0)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A()",
    ],
)
def test_a_program_that_ends_before_its_tests_has_not_passed(run, program):
    outcome = run(program + "\nassert False")
    assert not outcome.passed and outcome.result.startswith("failed: ")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import time\ntime.sleep(1000)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import sys\nwhile True: print('x' * 100_000); print('y' * 100_000, file=sys.stderr)",
        "import os, time\nos.closerange(0, 1000)\ntime.sleep(1000)",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
    ],
)
def test_a_program_without_end_is_killed(run, program):
    assert not run(program, SOON).passed


def test_no_process_outlives_its_program(run):
    marker = uuid.uuid4().hex
    outcome = run(
        """
        import os, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 1000)
            os.execv(PYTHON, [PYTHON, '-S', '-c', 'import time; time.sleep(1000)', MARKER])
        """,
        PYTHON=os.path.realpath(sys.executable),
        MARKER=marker,
    )
    assert outcome.result == "passed"
    while living(
        marker
    ):  # the system ends it a moment later; the time limit of the test ends the loop otherwise
        time.sleep(0.05)


@pytest.mark.real_start
def test_programs_end_when_headwater_is_killed():
    marker = uuid.uuid4().hex
    program = (
        f"import os\nos.execv({os.path.realpath(sys.executable)!r}, "
        f"['python', '-S', '-c', 'import time; time.sleep(1000)', {marker!r}])"
    )
    script = (
        "import sys; from headwater.evaluation.sandbox import ProgramLimits, Sandbox\n"
        "Sandbox(ProgramLimits(seconds=1000)).run(sys.stdin.read())"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True) as parent:
        parent.stdin.write(program)
        parent.stdin.close()
        while not living(marker):
            time.sleep(0.05)
        parent.send_signal(signal.SIGKILL)
    while living(marker):
        time.sleep(0.05)


def test_there_is_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for address in ("127.0.0.1", "localhost", "0.0.0.0"):
            outcome = run(
                "import socket\nsocket.create_connection((ADDRESS, PORT), 1)",
                ADDRESS=address,
                PORT=listener.getsockname()[1],
            )
            assert not outcome.passed
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_sockets_of_the_machine_cannot_be_reached(run, tmp_path):
    name = f"\0headwater-{uuid.uuid4().hex}"
    for address in (name, str(tmp_path / "socket")):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            outcome = run("import socket\nsocket.socket(socket.AF_UNIX).connect(ADDRESS)", ADDRESS=address)
            assert not outcome.passed


def test_the_files_of_the_user_can_be_neither_read_nor_written(run, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    targets = (secret, tmp_path / "new.txt", Path.home() / f"new-{uuid.uuid4().hex}.txt")
    for target in targets:
        assert not run("open(PATH, 'w').write('x')", PATH=str(target)).passed
        assert not run("open(PATH).read()", PATH=str(target)).passed
    assert secret.read_text() == "secret" and not any(each.exists() for each in targets[1:])
    assert run("import os\nassert not set(os.listdir('/')) & {'etc', 'proc', 'sys', 'var', 'home'}").passed


def test_the_files_of_the_system_cannot_be_written(run):
    folders = [sys.prefix, sys.base_prefix, "/usr", "/", "/dev"]
    outcome = run(
        """
        import os
        for folder in FOLDERS:
            try:
                open(os.path.join(os.path.realpath(folder), 'headwater-new.txt'), 'w')
            except OSError:
                continue
            raise SystemExit(folder)
        """,
        FOLDERS=folders,
    )
    assert outcome.result == "passed"


def test_privileges_cannot_be_regained(run):
    outcome = run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        assert os.getuid() != 0 and os.geteuid() != 0
        for flags in (0x10000000, 0x20000, 0x10000000 | 0x20000, 0x40000000):
            assert libc.unshare(flags) == -1
        assert libc.mount(b'none', b'/', None, 32 | 4096, None) == -1  # writable again
        assert libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == -1
        for number in (0, 65533):
            assert libc.setuid(number) == -1
        """
    )
    assert outcome.result == "passed"


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no filter of system calls")
def test_system_calls_that_programs_do_not_need_are_forbidden(run):
    outcome = run(
        """
        import ctypes, errno, os, socket
        libc = ctypes.CDLL(None, use_errno=True)
        for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET):
            try:
                socket.socket(family, socket.SOCK_DGRAM)
            except PermissionError:
                continue
            raise SystemExit(family)
        socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET), socket.socketpair()
        forbidden = {"shmget": (0, 1 << 20, 0o1600), "ptrace": (0, 0, 0, 0), "setns": (0, 0)}
        for name, arguments in forbidden.items():
            ctypes.set_errno(0)
            assert getattr(libc, name)(*arguments) == -1 and ctypes.get_errno() == errno.EPERM, name
        ctypes.set_errno(0)
        assert libc.syscall(425, 1, 0) == -1 and ctypes.get_errno() == errno.EPERM
        """
    )
    assert outcome.result == "passed"


def test_the_environment_of_the_run_is_not_visible(run, monkeypatch):
    monkeypatch.setenv("HEADWATER_SECRET", "secret-of-the-ranks")
    assert run("import os\nassert 'secret-of-the-ranks' not in str(dict(os.environ))").passed


def test_results_are_in_the_order_of_the_programs():
    counts = []
    programs = ["assert True", "assert False", "import time; time.sleep(0.3)", "1 / 0"]
    outcomes = Sandbox(USUAL).run_all(programs, 2, counts.append)
    assert [each.passed for each in outcomes] == [True, False, True, False]
    assert counts == [1, 2, 3, 4]


@pytest.mark.real_start
def test_a_user_without_rights_has_the_same_sandbox(tmp_path):
    programs = {
        "assert True": True,
        "import os\nos._exit(0)": False,
        f"open({str(tmp_path / 'new')!r}, 'w')": False,
        "import socket\nsocket.create_connection(('127.0.0.1', 1))": False,
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nassert os.getuid() == 65534\n"
        "assert libc.mount(b'none', b'/', None, 32 | 4096, None) == -1\nassert libc.setuid(0) == -1": True,
    }
    script = (
        "from headwater.evaluation.sandbox import ProgramLimits, Sandbox\n"
        f"for program in {list(programs)!r}: print(Sandbox(ProgramLimits(seconds=60)).run(program).passed)"
    )
    words = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", script]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.stdout.split() == [str(passes) for passes in programs.values()], ended.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.real_start
def test_without_user_namespaces_no_program_runs():
    script = (
        "from headwater.evaluation.sandbox import ProgramLimits, Sandbox\n"
        "Sandbox(ProgramLimits()).run('pass')"
    )
    refusing = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", refusing, "sh", sys.executable, "-c", script]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "does not allow a sandbox for generated programs: unshare: " in ended.stderr
    assert "--load_generations_path" in ended.stderr


def test_the_check_needs_no_more_than_the_smallest_limits():
    Sandbox(ProgramLimits(seconds=0.01, memory=64 << 20)).check()
