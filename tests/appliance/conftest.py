"""Queues with a few CSXs in temporary folders, whose supervisors end with the test."""

import os

import pytest
from queue_samples import end, end_jobs, processes_of, wait_until
from ssh_samples import Sshd

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import new_token
from headwater.appliance.supervisor import ensure_supervisor
from headwater.appliance.types import Submission


@pytest.fixture
def folder(tmp_path):
    """A queue with four CSXs, and nothing of it left after the test."""
    folder = QueueFolder(tmp_path / "queue")
    prepare(folder, num_csx=4, grace_s=600)
    yield folder
    end(processes_of(folder, "supervisor"))
    end(processes_of(folder, "watcher"))
    end_jobs(folder)


@pytest.fixture
def queue(folder):
    """The queue as its owner sees it; a supervisor is started when it is needed."""
    database = Database(folder)
    yield EmbeddedQueue(database, Caller.myself(), lambda: ensure_supervisor(folder))
    database.close()


@pytest.fixture
def submit(queue, tmp_path):
    """Submits a command line."""

    def run(*command, **options):
        options.setdefault("environment", dict(os.environ))
        return queue.submit(Submission(tuple(command), tmp_path, **options), new_token())

    return run


@pytest.fixture
def supervisor(folder):
    """Gives the process of the supervisor."""

    def find():
        ensure_supervisor(folder)
        return wait_until(lambda: processes_of(folder, "supervisor"))[0]

    return find


@pytest.fixture
def sshd(folder, tmp_path, monkeypatch):
    """A running SSH server, whose logins use the queue `folder`. The client knows it as `wafer`."""
    server = Sshd(tmp_path / "ssh", folder.path)
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.start()
    yield server
    server.stop()
