"""Other users who pretend to be a rank: their messages are not run, and the ranks still rendezvous."""

import contextlib
import encodings.idna  # noqa: F401  another user cannot read it any more where root has Python
import multiprocessing
import os
import pickle
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
from tests.rank_processes import free_port, run_ranks

from headwater.core.errors import RankError
from headwater.core.placement import Placement
from headwater.fabric import rendezvous, secret
from headwater.fabric.connection import Connection
from headwater.fabric.handshake import Keys, StrangerError, examine, introduce, purpose_digest
from headwater.fabric.launch.launcher import launch
from headwater.fabric.switchboard import Switchboard, address_of, call, listen_at, listen_on_host

MALLORY = 23457
FORK = multiprocessing.get_context("fork")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")


class Harmful:
    """An object that, when unpickled, writes a file with the user id."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"import os; open({self.path!r}, 'w').write(str(os.getuid()))",)


@contextlib.contextmanager
def mallory(attack, *arguments):
    """Run an attack as another user until the context ends; yield what the attack observed."""

    def run():
        os.setgroups([])
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        while True:
            try:
                seen.put(attack(*arguments))
            except OSError:
                time.sleep(0.002)

    seen = FORK.SimpleQueue()
    process = FORK.Process(target=run, daemon=True)
    process.start()
    try:
        yield seen
    finally:
        process.kill()
        process.join()


def pretend(connect, messages):
    """Send the hello of rank 1 without the secret, then all messages; return the answers."""
    with connect() as stranger:
        stranger.settimeout(5)
        hello = struct.pack("<8s32sII32s", b"HWRANK1\n", bytes(32), 1, 0, purpose_digest("rendezvous"))
        answer = b""
        try:
            stranger.sendall(hello)
            answer = stranger.recv(64, socket.MSG_WAITALL)
            for message in messages:
                stranger.sendall(message)
            return answer, stranger.recv(100)
        except ConnectionError:
            return answer, b""


def pretend_at(port, messages):
    """Pretend to be a rank at a port of this host; raise `OSError` if no rank answers."""
    answer, after = pretend(lambda: socket.create_connection(("127.0.0.1", port)), messages)
    if not answer:
        raise OSError("the rank has not begun to listen, or has ended")
    return answer, after


def wait_for(condition):
    """Block until a condition is true."""
    while not condition():
        time.sleep(0.01)


def add_up(fabric):
    """Use collectives that need every rank."""
    every = fabric.gather_tensors(torch.full((3,), float(fabric.rank)))
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return [*torch.stack(every).sum(0).tolist(), total.item(), *fabric.gather_objects(fabric.rank, int)]


@needs_root
def test_another_user_cannot_join_or_run_code_at_the_rendezvous_port(tmp_path):
    port, harm = free_port(), tmp_path / "harm"
    pickled = pickle.dumps(Harmful(str(harm)))
    messages = [bytes(32), struct.pack("<Q", len(pickled)) + bytes(32) + pickled]
    with (
        mallory(pretend_at, port, messages) as first,
        mallory(pretend_at, port, [pickled * 100]) as second,
    ):

        def add_up_when_attacked(fabric):
            wait_for(lambda: not (first.empty() or second.empty()))  # rank 0 listens until it ends
            return add_up(fabric)

        results = run_ranks(add_up_when_attacked, port=port)
        seen = [first.get(), second.get()]
    assert results == [[1.0, 1.0, 1.0, 2.0, 0, 1]] * 2
    assert not harm.exists()
    assert all(len(answer) == 64 and after == b"" for answer, after in seen), "closed before anything is sent"


LISTENING = re.compile(r"00010000 0001 01 +\d+ +(@\w+)$", re.MULTILINE)
"""Sockets of this host that listen under a name without a file, in /proc/net/unix, which all can read."""

RANK = """
import json, os, sys, time
from pathlib import Path
from headwater.fabric.cluster import join
fabric = join(200)
while not Path(sys.argv[1] + "attacked").exists():
    time.sleep(0.01)
words = fabric.gather_objects("ok", str)
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps([words, sorted(os.environ)]))
"""


def find_and_pretend(known, messages):
    """Pretend to be a rank at every new socket of this machine."""
    answers = []
    for name in set(LISTENING.findall(Path("/proc/net/unix").read_text())) - known:

        def connect(name=name):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect("\0" + name[1:])
            return stranger

        with contextlib.suppress(OSError):
            answers.append(pretend(connect, messages))
    if not answers:
        raise OSError
    return answers


@needs_root
def test_another_user_receives_no_bytes_from_ranks_of_one_host(tmp_path):
    known = set(LISTENING.findall(Path("/proc/net/unix").read_text()))
    harm = tmp_path / "harm"
    heard = []
    with mallory(find_and_pretend, known, [pickle.dumps(Harmful(str(harm)))]) as seen:

        def let_ranks_end():
            heard.extend(seen.get())
            (tmp_path / "attacked").touch()

        listening = threading.Thread(target=let_ranks_end)
        listening.start()
        assert launch(Placement(1, 1), ["-c", RANK, f"{tmp_path}/"], where="here") == 0
        listening.join()
    assert not harm.exists()
    assert heard and all(answer == b"" for answer, _ in heard), "sent away unheard"
    for rank in "01":
        assert '["ok", "ok"]' in (tmp_path / rank).read_text()
        assert '"HEADWATER_SECRET"' not in (tmp_path / rank).read_text(), "what a rank starts does not get it"


@needs_root
def test_a_process_that_pretends_to_be_rank_0_is_refused():
    port = free_port()

    def listen():
        with socket.create_server(("127.0.0.1", port)) as server:
            while True:
                stranger, _ = server.accept()
                stranger.recv(100)
                stranger.sendall(bytes(64))

    with mallory(listen), pytest.raises(AssertionError) as caught:
        until_listening(port)
        run_ranks(add_up, port=port)
    assert "the process that answers for rank 0 does not know the secret" in str(caught.value)


def until_listening(port):
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        time.sleep(0.01)


def test_ranks_listen_only_at_the_address_that_is_named():
    def listening(fabric):
        own = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        assert fabric.gather_objects("met", str) == ["met", "met"]
        return own

    assert run_ranks(listening) == [["127.0.0.1"], ["127.0.0.1"]]


def test_ranks_with_different_secrets_do_not_join(monkeypatch):
    board = Switchboard(0, b"a" * 32, listen_on_host(8))
    environment = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "HEADWATER_RENDEZVOUS": board.address,
        "HEADWATER_SECRET": "b" * 32,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankError, match="does not know the secret") as caught:
        rendezvous.meet(rendezvous.Process("here", os.getpid(), 0), 60)
    assert "HEADWATER_SECRET_FILE" in str(caught.value)
    board.close()


def test_rank_0_reports_a_refused_connection(monkeypatch):
    """The clock of rank 0 moves only after the refusal, so that a slow machine changes nothing."""
    refused, looks = threading.Event(), []

    def now():
        looks.append(refused.is_set())
        return 1000.0 if sum(looks) > 1 else 0.0  # rank 0 has looked for ranks once after the refusal

    with listen_at("127.0.0.1", 0, 8) as listener:
        environment = {"RANK": 0, "WORLD_SIZE": 2, "HEADWATER_RENDEZVOUS": "here"}
        for name, value in {**environment, "HEADWATER_LISTENER": os.dup(listener.fileno())}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(rendezvous, "time", types.SimpleNamespace(monotonic=now, sleep=time.sleep))
        stranger = socket.create_connection(listener.getsockname())

    def knock():
        with stranger:
            stranger.sendall(bytes(80))
            stranger.recv(1)
        refused.set()

    knocking = threading.Thread(target=knock)
    knocking.start()
    with pytest.raises(
        RankError,
        match=r"missing ranks \(of 2\): 1; a connection from 127.0.0.1:\d+ was refused: its first",
    ):
        rendezvous.meet(rendezvous.Process("here", os.getpid(), 0), 60)
    knocking.join()


def test_many_idle_connections_do_not_block_a_rank():
    board = Switchboard(0, b"s" * 32, listen_at("127.0.0.1", 0, 1024))
    idle = [socket.create_connection(board.address) for _ in range(63)]
    connection = call(board.address, b"s" * 32, "something", 1, 0, 100)
    found = None
    while found is None:
        found = board.take("something", 1, 100)
    connection.send_message(b"here")
    assert found.receive_message() == b"here"
    for each in (*idle, connection, found, board):
        each.close()


def test_a_rank_that_is_too_busy_to_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr("headwater.fabric.switchboard._HANDSHAKE_S", 0.1)
    with listen_at("127.0.0.1", 0, 8) as busy:
        board = Switchboard(1, b"s" * 32, listen_at("127.0.0.1", 0, 8))
        board.learn([address_of(busy)])
        told = []

        def wake():
            first, _ = busy.accept()
            time.sleep(0.3)
            first.close()
            told.append(Switchboard(0, b"s" * 32, busy.dup()))

        waking = threading.Thread(target=wake)
        waking.start()
        board.connect("something", 0, 200).close()
        waking.join()
        told[0].close()
        board.close()


def test_a_connection_to_an_ended_rank_fails_at_once():
    # The board listens first, so that the system cannot give it the port that becomes free.
    board = Switchboard(1, b"s" * 32, listen_at("127.0.0.1", 0, 8))
    with listen_at("127.0.0.1", 0, 8) as gone:
        address = address_of(gone)
    board.learn([address])
    with pytest.raises(ConnectionRefusedError):
        board.connect("something", 0, 1000)
    board.close()


def test_random_bytes_before_the_handshake_are_refused():
    draw = random.Random(0)
    secret_text = b"s" * 32
    good = struct.pack("<8s32sII32s", b"HWRANK1\n", bytes(32), 1, 0, bytes(32))
    for _ in range(300):
        ours, theirs = socket.socketpair()
        said = bytearray(good + bytes(32)) if draw.random() < 0.5 else bytearray(draw.randbytes(112))
        del said[draw.randrange(len(said) + 1) :]
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((StrangerError, OSError)):
            examine(ours, secret_text, 0, 100)
        ours.close()
        theirs.close()


@pytest.fixture
def pair():
    """Yield a function that returns two connected sockets, which are closed after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda: [opened.enter_context(each) for each in socket.socketpair()]


def test_both_ends_of_a_handshake_have_matching_keys(pair):
    ours, theirs = pair()
    known = []
    thread = threading.Thread(target=lambda: known.append(examine(theirs, b"s" * 32, 0, 100)))
    thread.start()
    keys = introduce(ours, b"s" * 32, "purpose", 1, 0, 100)
    thread.join()
    other, rank, purpose = known[0]
    assert (rank, purpose) == (1, purpose_digest("purpose"))
    assert keys.sending == other.receiving != keys.receiving == other.sending


def test_a_replayed_handshake_answer_is_refused(pair):
    ours, theirs = pair()
    examining = threading.Thread(target=_examine, args=(theirs,))
    examining.start()
    ours.sendall(struct.pack("<8s32sII32s", b"HWRANK1\n", bytes(32), 1, 0, purpose_digest("purpose")))
    answer = ours.recv(64, socket.MSG_WAITALL)
    ours.shutdown(socket.SHUT_RDWR)
    examining.join()

    ours, theirs = pair()
    replaying = threading.Thread(target=lambda: (theirs.recv(80), theirs.sendall(answer)))
    replaying.start()
    with pytest.raises(StrangerError, match="answers for rank 0 does not know the secret"):
        introduce(ours, b"s" * 32, "purpose", 1, 0, 100)
    replaying.join()


def _examine(connection):
    with contextlib.suppress(StrangerError, OSError):
        examine(connection, b"s" * 32, 0, 100)


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent[:44] + bytes([sent[44] ^ 1]) + sent[45:],
        lambda sent: bytes([sent[0] ^ 1]) + sent[1:] + b"x",
        lambda sent: sent[45:],
        lambda sent: sent[:45] * 2,
    ],
    ids=["content", "length", "left out", "repeated"],
)
def test_a_message_that_is_changed_repeated_or_left_out_is_refused(pair, change):
    (sender, wire), (other_wire, receiver) = pair(), pair()
    keys = Keys(b"a" * 32, b"b" * 32)
    sending = Connection(sender, keys, 1, 100)
    for message in (b"first", b"other"):
        sending.send_message(message).result()
    sent = wire.recv(90, socket.MSG_WAITALL)
    other_wire.sendall(change(sent))
    receiving = Connection(receiver, Keys(keys.receiving, keys.sending), 0, 100)
    with pytest.raises(RankError, match="a message from rank 0 is damaged"):
        for _ in range(2):
            receiving.receive_message()


def test_a_closed_connection_raises_instead_of_returning_a_message(pair):
    ours, theirs = pair()
    connection = Connection(ours, Keys(b"a", b"b"), 3, 100)
    theirs.sendall(bytes(20))
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match="rank 3 has closed the connection"):
        connection.receive_message()


def test_the_secret_is_created_once_and_is_private(tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    found = {secret.take_secret(environment) for _ in range(3)}
    (path,) = tmp_path.rglob("*.secret")
    assert len(found) == 1 and len(found.pop()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]

    path.chmod(0o640)
    with pytest.raises(RankError, match=r"mode 600, got uid .* and mode 640"):
        secret.take_secret(environment)
    target = tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(RankError, match="the secret of the ranks cannot be read: Too many levels"):
        secret.take_secret(environment)


def test_the_secret_is_removed_from_the_environment():
    environment = {"HEADWATER_SECRET": "x" * 20}
    assert secret.take_secret(environment) == b"x" * 20 and not environment
    with pytest.raises(RankError, match="16 to 4096 bytes, got 5"):
        secret.take_secret({"HEADWATER_SECRET": "short"})


@needs_root
def test_a_secret_of_another_user_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x" * 64)
    path.chmod(0o600)
    os.chown(path, MALLORY, MALLORY)
    with pytest.raises(RankError, match=rf"expected a file of this user .*got uid {MALLORY}"):
        secret.take_secret({"HEADWATER_SECRET_FILE": str(path)})


def test_sockets_within_a_host_have_no_file():
    with listen_on_host(1) as listener:
        assert listener.getsockname().startswith(b"\0")


def test_a_killed_launcher_leaves_no_files(tmp_path):
    waiting = f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(100)"
    program = f"""
from headwater.core.placement import Placement
from headwater.fabric.launch.launcher import launch
launch(Placement(1, 1), ["-c", {waiting!r}], where="")
"""
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as launcher:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        ranks = psutil.Process(launcher.pid).children()
        launcher.kill()
    for rank in ranks:
        rank.kill()
    psutil.wait_procs(ranks, 10)
    assert not list(folder.iterdir())
