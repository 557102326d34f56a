"""Locks whose holder a fork does not have."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, threading
from headwater.core import native
held, over = threading.Event(), threading.Event()
def slow_load(source, flags):
    held.set()
    over.wait(60)
native.load = slow_load
threading.Thread(target=native.native_library, args=("attention",)).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a fork that blocks
    over.set()
    native.native_library("few_rows")
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
"""


@pytest.mark.real_start
def test_a_fork_loads_a_library_while_a_thread_of_its_parent_compiles_one():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "5"
