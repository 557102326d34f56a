"""Items of a benchmark in separate processes: limits of time, crashes, and what is left of them.

Every test runs in a new interpreter, as the benchmarks do. A worker of pytest has run thousands of tests
before, with threads of many libraries, so a process that is forked from it may crash.
"""

import multiprocessing
import os
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
from benchmarks.transformers_walk import pool
from benchmarks.transformers_walk.pool import run_isolated


def in_new_interpreter(function, *args):
    """Return what the function returns in a new interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as interpreter:
        return interpreter.submit(function, *args).result()


def start_and_wait(item):
    """Start a process, write its number to a temporary folder, and wait."""
    if item == "short":
        return tempfile.gettempdir()
    started = subprocess.Popen(["sleep", "1000"])
    Path(item).write_text(f"{started.pid} {tempfile.mkdtemp()}")
    if item.endswith("busy"):
        while True:
            pass
    time.sleep(1000)
    return None


def results_of_slow_items(busy, idle):
    """Return the folder of a short item and the error of a slow one, for each of two slow items."""
    results = []
    # Other programs may use the cores, so the busy process gets much time by the clock.
    for wall_of_cpu, item in ((120, busy), (15, idle)):
        pool._WALL_OF_CPU = wall_of_cpu
        folder, error = run_isolated(start_and_wait, ["short", item], workers=2, limit_s=1)
        results.append((folder, str(error)))
    return results


def has_ended(pid):
    """Return true if a process has ended, also if nothing has collected its exit code."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_items_that_take_too_long_leave_no_process_and_no_file(tmp_path):
    busy, idle = str(tmp_path / "busy"), str(tmp_path / "idle")
    (first, cpu_error), (second, wall_error) = in_new_interpreter(results_of_slow_items, busy, idle)
    assert (cpu_error, wall_error) == ("took more than 1 s of CPU time", "took more than 15 s")
    assert not Path(first).exists() and not Path(second).exists()
    for file in (busy, idle):
        process, left = Path(file).read_text().split()
        assert not Path(left).exists()
        # The system ends a killed process a moment later. The time limit of the test ends the loop otherwise.
        while not has_ended(int(process)):
            time.sleep(0.01)


def crash_or_wait(item):
    """Crash, or make a file and wait."""
    if item == "crash":
        os._exit(3)
    Path(item).touch()
    time.sleep(1000)


def error_beside_a_waiting_item(waiting):
    """Return the error of an item that crashes while another one runs."""
    start = multiprocessing.context.ForkProcess.start

    def start_slowly(process):
        start(process)
        time.sleep(0.5)  # without a lock, another thread forks now

    multiprocessing.context.ForkProcess.start = start_slowly
    results = run_isolated(crash_or_wait, ["crash", str(waiting)], workers=2, limit_s=60)
    error = next(results)
    while not waiting.exists():
        time.sleep(0.01)
    time.sleep(1)  # the thread has started the process, and returns from `start_slowly`
    results.close()
    return str(error)


def test_a_crash_is_noticed_while_another_item_runs(tmp_path):
    error = in_new_interpreter(error_beside_a_waiting_item, tmp_path / "waiting")
    assert error == "the process ended with 3"
