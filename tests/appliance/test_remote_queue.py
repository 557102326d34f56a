"""The queue of another machine over a real SSH server on loopback."""

import contextlib
import json
import sys
import threading

import pytest
from queue_samples import wait_until
from ssh_samples import cutting

from headwater.appliance.remote.address import Address, read_address
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.queue import RemoteQueue
from headwater.appliance.types import Phase, Priority
from headwater.cli import csctl
from headwater.cli.main import main
from headwater.core.errors import ConfigError, QueueError

WAFER = "ssh://wafer"


@pytest.fixture
def remote(sshd):
    """The queue of the SSH server."""
    with contextlib.closing(Connection(Address("wafer"))) as connection:
        yield RemoteQueue(connection)


@pytest.fixture
def said(capsys):
    """Runs a command line of headwater or csctl in this process: exit code, stdout and stderr."""

    def run(*words, command=main):
        code = command([str(word) for word in words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_a_remote_queue_answers_as_the_queue_there(queue, remote, submit, folder):
    job = submit("sh", "-c", "echo done; printf é", num_csx=2, labels={"team": "a"})
    assert remote.num_csx() == 4
    assert remote.wait(job.name, 120).phase == Phase.SUCCEEDED
    assert remote.show(job.name) == queue.show(job.name)
    assert remote.jobs(everything=True) == queue.jobs(everything=True)
    assert "".join(remote.logs(job.name)) == "".join(queue.logs(job.name))
    assert [remote.read_log(job, -many)[-2:] for many in (2, 9000)] == ["é".encode()] * 2
    waiting = submit("true", num_csx=4)
    with pytest.raises(QueueError, match=f"job {job.name} has ended"):
        remote.set_priority(job.name, Priority.P1)
    assert remote.wait(waiting.name, 60).phase == Phase.SUCCEEDED


def test_the_commands_with_an_appliance(said, submit, sshd, monkeypatch):
    job = submit("sh", "-c", "echo hello; sleep 1000")
    code, out, _ = said("--appliance", WAFER, "jobs", "list", "-o", "json")
    assert code == 0 and [each["name"] for each in json.loads(out)] == [job.name]
    assert said("get", "jobs", f"--appliance={WAFER}", command=csctl.main)[1].split()[8] == job.name
    monkeypatch.setenv("HEADWATER_APPLIANCE", f"ssh://{sshd.user}@wafer:{sshd.port}/{sshd.folder}/place")
    assert said("label", "job", job.name, "a=b", command=csctl.main)[1] == f"{job.name} has a=b\n"
    assert said("jobs", "cancel", job.name)[0] == 0
    code, out, _ = said("jobs", "wait", job.name)
    assert code == 1 and "CANCELLED" in out
    assert "hello" in said("jobs", "logs", "-f", job.name)[1]
    code, _, err = said("jobs", "list", "--queue_dir", "x")
    assert code == 2 and "--queue_dir selects a queue of this machine" in err


def test_a_log_continues_at_the_byte_where_the_connection_broke(remote, submit, tmp_path):
    program = "i=0; while [ ! -e go ]; do i=$((i + 1)); echo line $i é; sleep 0.01; done"
    job = submit("sh", "-c", program)
    remote.show(job.name)
    text = ""
    with cutting(0.5, most=5) as cuts:
        for part in remote.logs(job.name, follow=True):
            text += part
            if len(cuts) >= 3:
                (tmp_path / "go").touch()
    lines = text.splitlines()[1:]
    assert lines and lines == [f"line {number} é" for number in range(1, len(lines) + 1)]
    assert text == job.log.read_text()


def test_the_connection_is_made_again_when_the_server_is_back(remote, submit, sshd):
    job = submit("sh", "-c", "sleep 2; echo end")
    remote.show(job.name)
    sshd.stop()
    timer = threading.Timer(1.5, sshd.start)
    timer.start()
    assert remote.wait(job.name, 120).phase == Phase.SUCCEEDED
    timer.join()


def test_a_cancellation_is_not_sent_twice(remote, submit, tmp_path, monkeypatch):
    job = submit("sh", "-c", "trap 'sleep 1; exit 0' TERM; touch up; while :; do sleep 0.05; done")
    wait_until((tmp_path / "up").exists)
    remote.show(job.name)
    receive = Connection._receive

    def broken(self, process):
        monkeypatch.setattr(Connection, "_receive", receive)
        reply = receive(self, process)
        process._process.kill()
        process._process.wait()
        assert reply.header["answer"]["name"] == job.name
        return receive(self, process)

    monkeypatch.setattr(Connection, "_receive", broken)
    with pytest.raises(QueueError, match="may or may not have been carried out"):
        remote.cancel(job.name)
    assert "exit code 0" in remote.wait(job.name, 120).reason, "one cancellation does not kill"


@pytest.mark.parametrize(
    ("key", "port", "command", "problem"),
    [
        ("user", 1, None, "cannot be reached: .*Connection refused"),
        ("stranger", None, None, "refuses the login: .*Permission denied.*\n.*\n.*ssh-copy-id"),
        (
            "user",
            None,
            "/nowhere/headwater",
            "headwater was not found there.*\n.*\n.*HEADWATER_APPLIANCE_COMMAND",
        ),
        (
            "user",
            None,
            "sh -c 'echo unknown command stdio >&2; exit 2'",
            "no remote server, so it has another version",
        ),
        ("user", None, "sh -c 'kill -9 $$'", "cannot be reached|ended with"),
    ],
)
def test_a_connection_that_cannot_be_made(key, port, command, problem, sshd, monkeypatch):
    sshd.write_client_config(key, port)
    if command is not None:
        monkeypatch.setenv("HEADWATER_APPLIANCE_COMMAND", command)
    with pytest.raises(QueueError, match=problem), contextlib.closing(Connection(Address("wafer"))) as found:
        found.open()


def test_an_unknown_host_and_a_changed_key(sshd, said):
    code, _, err = said("--appliance", "ssh://no-such-host.invalid", "jobs", "list")
    assert code == 2 and "the name of the machine is unknown" in err and "remedy: check the name" in err
    known = (sshd.folder / "known_hosts").read_text()
    stranger = (sshd.folder / "stranger.pub").read_text()
    (sshd.folder / "known_hosts").write_text(known.partition(" ")[0] + " " + stranger)
    code, _, err = said("--appliance", WAFER, "jobs", "list")
    assert code == 2 and "identity of the machine" in err and "ssh-keygen -R" in err


def test_another_protocol(sshd, monkeypatch):
    program = (
        "import sys; from headwater.appliance.remote.frames import *; "
        "sys.stdout.buffer.write(MARK + encode(Frame({'protocol': 99, 'version': '7.0'}))); "
        "sys.stdout.flush(); sys.stdin.read() #"
    )
    monkeypatch.setenv("HEADWATER_APPLIANCE_COMMAND", f'{sys.executable} -c "{program}"')
    with pytest.raises(QueueError, match="got protocol 99 of headwater 7"):
        Connection(Address("wafer")).open()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ssh://wafer", Address("wafer")),
        ("ssh://alice@wafer:2222/data/hw/", Address("wafer", "alice", 2222, "/data/hw")),
        ("ssh://wafer/~/place", Address("wafer", path="~/place")),
        ("ssh://[fe80::1]:22", Address("fe80::1", port=22)),
    ],
)
def test_an_address_is_read_and_written(text, address):
    assert read_address(text, where="--appliance") == address
    assert read_address(str(address), where="--appliance") == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("wafer", "expected an address ssh://host"),
        ("http://wafer", "expected an address ssh://host"),
        ("ssh://-oProxyCommand=x", "not a name of a host"),
        ("ssh://-l@wafer", "not a name of a user"),
        ("ssh://a:secret@wafer", "without a password"),
        ("ssh://wafer:99999", "not an address"),
        ("ssh://", "not a name of a host"),
    ],
)
def test_malformed_addresses(text, problem):
    with pytest.raises(ConfigError, match=problem):
        read_address(text, where="--appliance")


def test_a_command_that_runs_only_here(said):
    code, _, err = said("--appliance", WAFER, "generate", "--prompt", "x")
    assert code == 2 and "headwater generate runs only on this machine" in err
    code, _, err = said("jobs", "list", "--appliance")
    assert code == 2 and "expected an address, got none\n  where: --appliance" in err
