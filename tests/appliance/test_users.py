"""Several users of one machine: a queue of root that all users share, with users reported by the kernel."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from queue_samples import end, processes_of, wait_until

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.supervisor import ensure_supervisor
from headwater.appliance.types import Phase, Submission

ALICE, BOB = 23451, 23452

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

BECOME = """
import json, os, socket, sys
from pathlib import Path
uid = int(sys.argv.pop(1))  # the interpreter itself may be where this user cannot go
"""
LEAVE_ROOT = """
os.setgroups([]); os.setgid(uid); os.setuid(uid)
"""
ASK = (
    BECOME
    + """
from headwater.appliance.open import open_queue
from headwater.appliance.types import Priority, Submission
from headwater.core.errors import HeadwaterError
"""
    + LEAVE_ROOT
    + """
try:
    queue = open_queue("embedded", Path(sys.argv[1]))
    for question in json.loads(sys.argv[2]):
        name, *rest = question
        if name == "submit":
            command, options = rest
            options["model_dir"] = Path(options["model_dir"]) if "model_dir" in options else None
            environment = {"PATH": os.environ["PATH"], "SECRET": "of the user"}
            found = queue.submit(Submission(tuple(command), Path("/tmp"), environment, **options), str(rest))
        else:
            found = getattr(queue, name)(*rest)
            found = list(found) if name == "logs" else found
        if isinstance(found, list):
            found = [job.name for job in found]
        print(json.dumps(found if isinstance(found, list | int) else found.to_record()))
except HeadwaterError as error:
    print(json.dumps({"error": str(error)}))
"""
)


@pytest.fixture
def folder():
    """A queue that root keeps for all users, where they can reach it."""
    with tempfile.TemporaryDirectory(prefix="headwater-queue-") as path:
        Path(path).chmod(0o755)
        folder = QueueFolder(Path(path) / "queue")
        prepare(folder, num_csx=4, grace_s=600, shared=True)
        ensure_supervisor(folder)
        wait_until(folder.socket.exists)
        yield folder
        end(processes_of(folder, "supervisor"))
        end(processes_of(folder, "watcher"))


def run_as(uid, program, *arguments):
    """Run a Python program as another user and return its output."""
    command = [sys.executable, "-c", program, str(uid), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(folder, uid, *questions):
    """Return the answers to a user's requests, which a separate process of that user sends."""
    return [json.loads(line) for line in run_as(uid, ASK, folder.path, json.dumps(questions)).splitlines()]


def test_users_share_csxs_but_cannot_change_each_others_jobs(folder):
    place = folder.path.parent / "alice"
    place.mkdir()
    os.chown(place, ALICE, ALICE)
    command = ["sh", "-c", "id -u; id -G; grep ^CapEff /proc/self/status; echo $SECRET; sleep 1000"]
    (alice,) = ask(folder, ALICE, ["submit", command, {"model_dir": str(place / "run"), "num_csx": 3}])
    name = alice["name"]
    assert (alice["user"], alice["systems"]) == (str(ALICE), [])

    bob, big = ask(folder, BOB, ["submit", ["true"], {}], ["submit", ["true"], {"num_csx": 9}])
    assert "expected num_csx to be 1 to 4 (CSXs of the queue), got 9" in big["error"]
    root = EmbeddedQueue(Database(folder), Caller.myself(), lambda: None)
    over = root.wait(bob["name"], 120)
    assert over.phase == Phase.SUCCEEDED and over.systems == ("csx-3",)

    for change in (["cancel", name], ["label", name, {"mine": "now"}], ["set_priority", name, "p1"]):
        assert ask(folder, BOB, change) == [
            {"error": f"job {name} belongs to {ALICE}\n  remedy: ask {ALICE}, or root"}
        ]
    of_root = root.submit(Submission(("sleep", "1000"), Path("/")), "of root").name
    wait_until(lambda: root.show(of_root).log.exists())
    refused, hidden = (ask(folder, BOB, [question, of_root])[0]["error"] for question in ("cancel", "logs"))
    assert refused == f"job {of_root} belongs to root\n  remedy: ask root"
    assert "cannot be read: Permission denied" in hidden and "ask root" in hidden
    root.cancel(of_root)
    root.wait(of_root, 120)
    jobs, seen, number = ask(folder, BOB, ["jobs"], ["show", name], ["num_csx"])
    assert (jobs, seen["phase"], number) == ([name], "RUNNING", 4)
    assert "of the user" not in json.dumps(seen)
    (taken,) = ask(folder, BOB, ["submit", ["true"], {"model_dir": str(place / "run")}])
    assert "uses this model_dir" in taken["error"]

    log = Path(seen["log"])
    wait_until(lambda: "of the user" in log.read_text())
    _, uid, groups, capabilities, _ = log.read_text().splitlines()
    assert (uid, groups, int(capabilities.split()[1], 16)) == (str(ALICE), str(ALICE), 0)
    assert log.stat().st_uid == ALICE

    assert ask(folder, ALICE, ["label", name, {"mine": "now"}])[0]["labels"] == {"mine": "now"}
    assert root.cancel(name).phase == Phase.RUNNING
    assert root.wait(name, 120).phase == Phase.CANCELLED


def test_a_log_without_a_model_dir_belongs_to_the_user(folder):
    job, other = ask(folder, ALICE, ["submit", ["id", "-u"], {}], ["submit", ["id", "-u"], {"num_csx": 2}])
    root = EmbeddedQueue(Database(folder), Caller.myself(), lambda: None)
    for name in (job["name"], other["name"]):
        assert root.wait(name, 120).phase == Phase.SUCCEEDED
    log = Path(job["log"])
    assert log.read_text().splitlines()[1] == str(ALICE)
    assert (log.parent.stat().st_uid, log.parent.stat().st_mode & 0o777) == (ALICE, 0o700)
    program = f"{BECOME}{LEAVE_ROOT}print(os.access(sys.argv[1], os.R_OK))"
    assert [run_as(uid, program, log).strip() for uid in (ALICE, BOB)] == ["True", "False"]


def test_other_users_cannot_access_the_queues_files(folder):
    program = f"{BECOME}{LEAVE_ROOT}print([os.access(path, os.R_OK) for path in sys.argv[1:]])"
    paths = [path for path in folder.path.iterdir() if path not in (folder.socket, folder.path / "shared")]
    assert folder.database in paths
    assert run_as(BOB, program, *paths) == f"{[False] * len(paths)}\n"
    program = f"{BECOME}{LEAVE_ROOT}print([os.access(path, os.W_OK) for path in sys.argv[1:]])"
    assert run_as(BOB, program, folder.path, *paths) == f"{[False] * (1 + len(paths))}\n"


def test_malformed_requests_of_users_are_answered(folder):
    program = (
        f"{BECOME}{LEAVE_ROOT}s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(sys.argv[2].encode() + b'\\n'); print(s.makefile().readline())"
    )
    record = {"command": ["true"], "folder": "/", "model_dir": None, "priority": "p2"}
    for text in (
        "nonsense",
        '{"ask": "close"}',
        '{"ask": "show", "name": 3}',
        json.dumps({"ask": "submit", "token": "x", "submission": {**record, "labels": [1]}}),
        json.dumps({"ask": "submit", "token": "x", "submission": {**record, "folder": "here"}}),
        json.dumps({"ask": "submit", "token": "x", "submission": {**record, "uid": 0}}),
        json.dumps({"ask": "submit", "token": ["x"], "submission": record}),
        json.dumps({"ask": "submit", "token": "x", "submission": {**record, "umask": "x"}}),
        json.dumps({"ask": "label", "name": "wsjob-000000000001", "labels": {"a b": "c"}}),
    ):
        assert json.loads(run_as(BOB, program, folder.socket, text)).keys() == {"error"}, text
    assert ask(folder, BOB, ["jobs"]) == [[]]


def test_a_queue_without_a_supervisor_is_an_error(folder):
    end(processes_of(folder, "supervisor"))
    (answer,) = ask(folder, BOB, ["jobs"])
    assert "does not answer" in answer["error"] and "serve --all_users" in answer["error"]


def test_another_users_queue_is_refused():
    with tempfile.TemporaryDirectory(prefix="headwater-queue-") as path:
        Path(path).chmod(0o755)
        folder = QueueFolder(Path(path) / "queue")
        prepare(folder, num_csx=1)
        (answer,) = ask(folder, BOB, ["jobs"])
        assert "the queue belongs to root" in answer["error"]
