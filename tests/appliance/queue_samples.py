"""Processes of a queue, and waiting for them."""

import time

import psutil
import pytest

from headwater.appliance.job_processes import kill_processes
from headwater.appliance.types import Priority
from headwater.core.errors import QueueError


def processes_of(folder, kind):
    """The supervisors, or the processes that watch over jobs, of a queue."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if f"headwater.appliance.{kind}" in words and str(folder.path) in words:
            found.append(process)
    return found


def end(processes):
    """Kill and reap."""
    for process in processes:
        try:
            process.kill()
            process.wait(100)
        except psutil.NoSuchProcess:
            pass


def job_processes(folder):
    """The processes of all jobs of a queue. Jobs of other queues, as of other tests, have the same names."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("HEADWATER_QUEUE_DIR") == str(folder.path) and "HEADWATER_JOB" in environment:
            found.append((environment["HEADWATER_JOB"], process))
    return found


def end_jobs(folder):
    """Kill all processes of a queue's jobs. Only the first process of a job ends with its watcher."""
    for name in {name for name, _ in job_processes(folder)}:
        assert kill_processes(folder.path, name)


def wait_until(condition, seconds=120):
    """Block until `condition` returns a true value, and return the value."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.02)
    return found


def assert_cannot_be_changed(queue, job):
    """A job that has succeeded stays as it is."""
    for change in (
        lambda: queue.cancel(job.name),
        lambda: queue.label(job.name, {"a": "b"}),
        lambda: queue.set_priority(job.name, Priority.P1),
    ):
        with pytest.raises(QueueError, match=f"{job.name} has ended: SUCCEEDED"):
            change()
