"""Frames, uploads and artifacts of an appliance, without a connection."""

import dataclasses
import hashlib
import math
import os
import random

import pytest

from headwater.appliance.remote.address import Address
from headwater.appliance.remote.artifacts import BLOCK, Artifact, list_artifacts, read_block
from headwater.appliance.remote.bundle import Bundle
from headwater.appliance.remote.connection import delay_s
from headwater.appliance.remote.contents import Contents
from headwater.appliance.remote.frames import MARK, MAX_BODY, Decoder, Frame, encode
from headwater.appliance.remote.server import Server, job_environment
from headwater.appliance.remote.ssh import command_line, explain
from headwater.appliance.remote.workspace import Workspace
from headwater.core.errors import ConfigError, QueueError, error_class


def digest(data):
    return hashlib.sha256(data).hexdigest()


SUBMIT = {
    "ask": "submit",
    "token": "t",
    "command": ["true"],
    "is_headwater": False,
    "files": [],
    "python_paths": [],
    "run": None,
    "only_reads": False,
    "origin": {},
    "num_csx": 1,
    "priority": "p2",
    "labels": {},
    "umask": 0o022,
}


def test_frames_in_parts_of_any_size():
    generator = random.Random(0)
    frames = [Frame({"n": n, "é": None}, generator.randbytes(generator.randrange(3000))) for n in range(50)]
    stream = b"Welcome!\r\n\0head" + MARK + b"".join(map(encode, frames))
    decoder, found = Decoder(skip_to_mark=True), []
    while stream:
        size = generator.randrange(1, 2000)
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == frames


@pytest.mark.parametrize("stream", [b"\xff" * 8, b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\1\0\0\0\0{"])
def test_a_stream_without_frames(stream):
    with pytest.raises(QueueError, match=r"expected a (frame|header)"):
        list(Decoder().feed(stream))
    with pytest.raises(QueueError, match="at most"):
        encode(Frame({}, bytes(MAX_BODY + 1)))


def test_a_part_of_the_contents_may_be_sent_twice(tmp_path):
    contents, data = Contents(tmp_path), bytes(range(256)) * 40
    name = digest(data)
    assert contents.received(name) == 0
    assert contents.add(name, len(data), 0, data[:3000]) == 3000
    assert contents.add(name, len(data), 5000, data[5000:]) == 3000, "a part before is missing"
    assert contents.add(name, len(data), 0, data[:3000]) == 3000, "the reply was lost, so it came again"
    assert Contents(tmp_path).add(name, len(data), 3000, data[3000:]) is None
    assert contents.received(name) is None and contents.path(name).read_bytes() == data
    assert contents.add(name, len(data), 0, data) is None
    with pytest.raises(QueueError, match="do not have the checksum"):
        contents.add(digest(b"other"), 5, 0, b"wrong")
    assert contents.received(digest(b"other")) == 0, "the wrong bytes are deleted"
    assert contents.add(digest(b""), 0, 0, b"") is None


def test_unused_contents_are_deleted(tmp_path):
    contents = Contents(tmp_path)
    for data in (b"old", b"new"):
        contents.add(digest(data), 3, 0, data)
    os.utime(contents.path(digest(b"old")), (0, 0))
    contents.delete_unused()
    assert contents.received(digest(b"old")) == 0 and contents.received(digest(b"new")) is None


def test_the_folder_of_a_job(tmp_path):
    workspace = Workspace(tmp_path / "place")
    workspace.create()
    assert (tmp_path / "place").stat().st_mode & 0o777 == 0o700
    workspace.contents.add(digest(b"run"), 3, 0, b"run")
    files = [{"path": "a/b.sh", "digest": digest(b"run"), "executable": True}]
    folder = workspace.lay_out("token", files, {"host": "laptop"})
    assert (folder / "a" / "b.sh").read_bytes() == b"run" and os.access(folder / "a" / "b.sh", os.X_OK)
    (folder / "a" / "b.sh").write_text("changed by the job")
    assert workspace.lay_out("token", files, {}) == folder
    assert (folder / "a" / "b.sh").read_text() == "changed by the job", "laid out once"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "."])
def test_a_file_cannot_leave_the_folder_of_its_job(path, tmp_path):
    workspace = Workspace(tmp_path)
    workspace.contents.add(digest(b"x"), 1, 0, b"x")
    with pytest.raises(QueueError, match="expected a path inside"):
        workspace.lay_out("token", [{"path": path, "digest": digest(b"x"), "executable": False}], {})
    with pytest.raises(QueueError, match="expected a name"):
        workspace.run(path)
    with pytest.raises(QueueError, match="expected a path inside"):
        Artifact.from_record(dataclasses.asdict(Artifact(path, 1, 1, 1, 1)))


def test_artifacts_are_whole_files_of_one_version(tmp_path):
    data = os.urandom(BLOCK + 10)
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "weights").write_bytes(data)
    for name in ("checkpoint_2.partial", "run.lock", "x.tmp"):
        (tmp_path / name).write_text("not yet")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (found,) = list_artifacts(tmp_path)
    assert (found.path, found.size) == ("checkpoint_1/weights", len(data))
    assert Artifact.from_record(found.to_record()) == found
    assert read_block(tmp_path, found, 0, None) == ("data", data[:BLOCK])
    assert read_block(tmp_path, found, BLOCK, digest(data[BLOCK:])) == ("same", b"")
    assert read_block(tmp_path, found, BLOCK, digest(b"")) == ("data", data[BLOCK:])
    with (tmp_path / "checkpoint_1" / "weights").open("ab") as file:
        file.write(b"more")
    assert read_block(tmp_path, found, 0, None) == ("data", data[:BLOCK]), (
        "it still begins with the listed bytes"
    )
    assert read_block(tmp_path, found, BLOCK, None) == ("data", data[BLOCK:])
    (tmp_path / "checkpoint_1" / "other").write_bytes(data + b"more")
    (tmp_path / "checkpoint_1" / "other").replace(tmp_path / "checkpoint_1" / "weights")
    assert read_block(tmp_path, found, 0, None) == ("changed", b"")
    (tmp_path / "checkpoint_1" / "weights").write_bytes(data[:-1])
    assert read_block(tmp_path, found, 0, None) == ("changed", b"")
    (tmp_path / "checkpoint_1" / "weights").write_bytes(data)
    (found,) = list_artifacts(tmp_path)
    (tmp_path / "checkpoint_1" / "weights").write_bytes(data[::-1])
    assert read_block(tmp_path, found, 0, None) == ("changed", b"")
    (tmp_path / "checkpoint_1" / "weights").unlink()
    assert read_block(tmp_path, found, 0, None) == ("changed", b"")


def test_the_files_to_send_are_limited(tmp_path):
    (tmp_path / "code" / ".git").mkdir(parents=True)
    for name in ("a.py", ".git/large"):
        (tmp_path / "code" / name).write_bytes(bytes(600_000))
    bundle = Bundle(1 << 20)
    bundle.add(tmp_path / "code", "code")
    assert [each.path for each in bundle.files] == ["code/a.py"]
    with pytest.raises(ConfigError, match=r"expected at most 1 MiB and .* files to send, found more"):
        bundle.add(tmp_path / "code" / "a.py", "again.py")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ask": 1},
        {"ask": "find"},
        {"ask": "find", "digests": [1]},
        {"ask": "ping", "more": 1},
        {"ask": "add", "digest": "../x", "size": 1, "position": 0},
        {**SUBMIT, "command": [1]},
        {**SUBMIT, "python_paths": [None]},
        {**SUBMIT, "files": ["a.py"]},
        {**SUBMIT, "files": [{"path": "../a.py", "digest": digest(b""), "executable": False}]},
        {**SUBMIT, "files": [{"path": "a.py", "digest": digest(b""), "executable": False}]},
        {**SUBMIT, "run": "../x"},
    ],
    ids=str,
)
def test_malformed_requests_have_an_error_as_reply(fields, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    error = Server().reply(Frame(fields)).header["error"]
    assert error_class(error["kind"]) is not None and error["remedy"]
    assert not list(tmp_path.rglob("*.partial")), "no part of a refused submission is left"


@pytest.mark.parametrize("wait_s", [math.nan, -1])
def test_a_wait_without_end_is_refused(wait_s, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    request = Frame({"ask": "watch", "name": "1", "position": 0, "phase": None, "wait_s": wait_s})
    error = Server().reply(request).header["error"]
    assert error["what"] == f"expected wait_s >= 0, got {wait_s}"


def test_negative_positions_are_refused(tmp_path):
    (tmp_path / "log").write_bytes(b"data")
    with pytest.raises(QueueError, match="expected a position of at least 0, got -1"):
        read_block(tmp_path, list_artifacts(tmp_path)[0], -1, None)
    assert Contents(tmp_path / "contents").add(digest(b"data"), 4, -1, b"data") == 0


def test_the_environment_of_a_job_is_that_of_the_login(tmp_path):
    own = {
        "PATH": "/bin",
        "SSH_CONNECTION": "x",
        "HEADWATER_JOB": "1",
        "HEADWATER_APPLIANCE": "ssh://x",
        "A": "b",
    }
    found = job_environment(own, [tmp_path])
    assert found.keys() == {"PATH", "A", "PYTHONPATH"}
    assert found["PATH"].endswith(":/bin") and found["PYTHONPATH"] == str(tmp_path)


def test_the_command_of_ssh_has_options_of_the_user_and_the_address():
    words = command_line(Address("wafer", "alice", 22), {"HEADWATER_SSH": "ssh -i 'my key'"})
    assert words[:3] == ["ssh", "-i", "my key"]
    assert words[-7:] == ["-p", "22", "-l", "alice", "--", "wafer", "headwater jobs stdio"]
    with pytest.raises(ConfigError, match="cannot divide"):
        command_line(Address("wafer"), {"HEADWATER_SSH": "ssh '"})


@pytest.mark.parametrize(
    ("code", "messages", "said", "is_final"),
    [
        (255, "ssh: connect to host wafer port 22: No route to host", "cannot be reached", False),
        (255, "Timeout, server wafer not responding.", "cannot be reached", False),
        (255, "ssh: Could not resolve hostname wafer: x", "name of the machine is unknown", False),
        (255, "alice@wafer: Permission denied (publickey).", "refuses the login", True),
        (255, "No ED25519 host key is known\nHost key verification failed.", "identity of the machine", True),
        (127, "sh: headwater: not found", "headwater was not found there", True),
        (1, "MemoryError", "ended with exit code 1: MemoryError", True),
        (-9, "", "cannot be reached: no message", False),
    ],
)
def test_failures_of_ssh(code, messages, said, is_final):
    failure = explain(Address("wafer", "alice"), code, messages)
    assert said in failure.error.what and failure.error.remedy and failure.is_final is is_final


def test_pauses_between_attempts_grow():
    pauses = [delay_s(attempt) for attempt in range(100)]
    assert pauses[0] == 0.2 and pauses[-1] == 30 and pauses == sorted(pauses)
