"""Whatever somebody sends to a shared queue is answered, with an error of the project's own."""

import json
import os
import socket
import threading

import pytest
from request_fuzz import ask, kind_of, malformed

from headwater.appliance import client
from headwater.appliance.client import SharedQueue
from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.open import prepare
from headwater.appliance.server import ConnectionLimits, serving, socket_address
from headwater.appliance.types import Submission
from headwater.core.errors import ConfigError, QueueError


@pytest.fixture
def served(folder):
    """Run a queue that a thread of this process serves to clients; no supervisor starts its jobs."""
    prepare(folder, shared=True)
    with serving(folder):
        yield folder


@pytest.fixture
def quiet(folder):
    """The queue as its owner sees it, without a supervisor."""
    database = Database(folder)
    yield EmbeddedQueue(database, Caller.myself(), lambda: None)
    database.close()


def add(queue, tmp_path, count=1, **options):
    """Submit jobs that no supervisor starts; return the last."""
    for number in range(count):
        job = queue.submit(Submission(("true",), tmp_path, **options), f"{options}{number}")
    return job


def test_malformed_requests_are_answered(served, capfd):
    kinds = [kind_of(ask(served, request)) for request in malformed(200)]
    assert {"answer", "ConfigError", "QueueError"} == set(kinds)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (b"[" * 200_000, "expected a request in JSON"),
        (b'{"ask": "show", "name": "wsjob-' + b"9" * 30 + b'"}', "there is no job"),
        (b'{"ask": "jobs", "everything": 1}', "expected bool for 'everything', got int"),
        (b'{"ask": "jobs"}', "the field 'everything' is missing"),
        (b'{"ask": "label", "name": "1", "labels": {"a": 3}}', "expected strings or null"),
        (b'{"ask": "label", "name": "1", "labels": {"a b": "c"}}', "expected a label name=value, got"),
        (b'{"ask": "submit", "submission": {}, "token": "t"}', "the field 'command' is missing"),
        (b'{"ask": "drop"}', "expected one of submit, jobs, show"),
        (b"[]", "expected a request as a JSON object, got a list"),
    ],
)
def test_an_error_says_what_was_expected_and_what_to_do(served, request_, what):
    error = json.loads(ask(served, request_))["error"]
    assert what in error["what"] and error["remedy"]


def test_a_job_with_numbers_beyond_64_bits_is_refused(served):
    submission = Submission(("true",), served.path).to_record()
    for name, value in (("num_csx", 10**30), ("umask", 10**30), ("umask", -1), ("num_csx", True)):
        request = {"ask": "submit", "token": "t", "submission": {**submission, name: value}}
        assert kind_of(ask(served, json.dumps(request).encode())) == "ConfigError", (name, value)


@pytest.mark.parametrize(
    "name", ["wsjob-" + "9" * 26, "9" * 5000, "wsjob-٣", "wsjob-", "", "-1", "wsjob-1.0"]
)
def test_invalid_job_names(quiet, name):
    with pytest.raises(QueueError, match="there is no job"):
        quiet.show(name)


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected names of folders in UTF-8"):
        Submission(("true",), tmp_path, model_dir=tmp_path / os.fsdecode(b"\xff"))


def test_many_connections_at_once_are_answered(served):
    """More clients than the system lets wait for a server by default."""
    waiting = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX)
        with socket_address(served) as address:
            connection.connect(address)
        waiting.append(connection)
    queue, found = SharedQueue(served), []
    askers = [threading.Thread(target=lambda: found.append(queue.num_csx())) for _ in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for connection in waiting:
        connection.close()
    assert found == [4] * 20


def connect(folder):
    """A connection on which nothing is asked."""
    connection = socket.socket(socket.AF_UNIX)
    with socket_address(folder) as address:
        connection.connect(address)
    return connection


def refusal_of(connection):
    """The error that a server sends to a connection that asks nothing."""
    connection.settimeout(60)
    with connection, connection.makefile("rb") as file:
        return json.loads(file.readline())["error"]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"per_user": 3}, f"uid {os.geteuid()} has 3 connections to the queue, the most for one user"),
        ({"most": 3}, "the queue has 3 connections, the most for all users"),
    ],
)
def test_connections_beyond_the_limit_are_refused_at_once(folder, limits, said, monkeypatch, capfd):
    prepare(folder, shared=True)
    with serving(folder, ConnectionLimits(**limits)):
        idle = [connect(folder) for _ in range(3)]
        error = refusal_of(connect(folder))
        assert (error["kind"], error["what"]) == ("QueueError", said)
        assert "close connections that are idle" in error["remedy"]
        monkeypatch.setattr(client, "_RETRY_FOR_S", 0.0)
        with pytest.raises(QueueError, match=said):
            SharedQueue(folder).num_csx()
        monkeypatch.undo()
        threads = threading.active_count()
        more = [connect(folder) for _ in range(20)]
        assert [refusal_of(each)["what"] for each in more] == [said] * 20
        assert threading.active_count() == threads
        asker = threading.Timer(0.2, lambda: [each.close() for each in idle])
        asker.start()
        assert SharedQueue(folder).num_csx() == 4, "a client asks again until there is a place"
        asker.join()
    assert "Traceback" not in capfd.readouterr().err


def test_idle_connections_of_one_user_leave_places_for_others():
    places = ConnectionLimits(most=5, per_user=3)
    assert [places.take(1) is None for _ in range(5)] == [True] * 3 + [False] * 2
    assert [places.take(2) is None for _ in range(3)] == [True, True, False]
    places.leave(1)
    assert places.take(3) is None


def test_a_job_is_named_by_number_or_prefix(quiet, tmp_path):
    add(quiet, tmp_path, 11)
    for name in ("wsjob-000000000007", "wsjob-7", "7"):
        assert quiet.show(name).name == "wsjob-000000000007"
    for name in ("wsjob-00000000001", "00000000001"):
        with pytest.raises(QueueError, match="wsjob-000000000010, wsjob-000000000011"):
            quiet.show(name)
    with pytest.raises(QueueError, match="several jobs have names that start with"):
        quiet.cancel("wsjob-0")
    with pytest.raises(QueueError, match="there is no job 'wsjob-00000000002'"):
        quiet.show("wsjob-00000000002")
    assert quiet.label("11", {"a": "b"}).name == "wsjob-000000000011"


def test_a_unique_prefix_names_a_job(quiet, tmp_path):
    add(quiet, tmp_path)
    for name in ("wsjob-0", "wsjob-00000000000", "000"):
        assert quiet.show(name).name == "wsjob-000000000001"


def test_a_job_that_never_ran_shows_no_systems(quiet, folder, tmp_path):
    job = add(quiet, tmp_path)
    database = Database(folder)
    database.execute("UPDATE jobs SET slots = '[0, 1]', phase = 'INITIALIZING'")
    assert quiet.show(job.name).systems == ("csx-0", "csx-1")
    assert quiet.cancel(job.name).systems == ()
    database.close()
