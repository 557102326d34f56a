"""Input workers as separate processes, which are killed and started again."""

import errno
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading

import h5py
import pytest
import torch
from run_samples import history, model_dir

from headwater.config.run import load_params
from headwater.core.errors import ConfigError, DataError, RankError, StoreError
from headwater.data.input_worker import NUMBER, InputWorker
from headwater.data.remote_samples import InputWorkers, RemoteSamples
from headwater.fabric.switchboard import call
from headwater.trainer.datasets import open_data
from headwater.trainer.input_workers import read_place, workers_of_rank

SECRET = b"s" * 32
KEY = "trainer.fit.train_dataloader.input_workers"


class Worker:
    """A process `headwater input_worker` for a params file, at a port that it keeps."""

    def __init__(self, params):
        self._params = params
        self.port = 0
        self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-P", "-m", "headwater", "input_worker", str(self._params)]
        words = ["--listen", self.address, f"--{KEY}=[x:1]"]
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line
        self.port = int(line.rpartition(":")[2])

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def worker(params):
    """Starts input workers for the params file."""
    started = []

    def start():
        started.append(Worker(params))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def option(*workers):
    return f"--{KEY}=[{','.join(each.address for each in workers)}]"


def test_the_loss_curve_is_the_same_when_workers_are_killed(headwater, params, tmp_path, worker, monkeypatch):
    assert headwater("fit", params)[0] == 0
    first, second = worker(), worker()
    ask, calls, restarts = InputWorkers.ask, itertools.count(1), []

    def ask_and_kill(self, connections, number, request):
        lost = {4: first, 7: second}.get(next(calls))
        if lost is not None:
            lost.kill()
            timer = threading.Timer(0.5, lost.start)
            timer.start()
            restarts.append(timer)
        return ask(self, connections, number, request)

    monkeypatch.setattr(InputWorkers, "ask", ask_and_kill)
    code, _, err = headwater("fit", params, option(first, second), model_dir(tmp_path / "with"))
    for timer in restarts:
        timer.join()
    assert code == 0, err
    assert len(restarts) == 2
    assert history(tmp_path / "with") == history(tmp_path / "run")


def test_batches_wait_for_a_worker_that_starts_again(params, worker):
    config = load_params(params)
    section, model = config.fit.train_dataloader, config.init.model
    expected = iter(open_data(section, model, seed=3, repeat=True).create_dataloader())
    process = worker()
    remote = section.model_copy(update={"input_workers": (process.address,)})
    loader = open_data(remote, model, seed=3, repeat=True).create_dataloader()
    batches = iter(loader)
    for number in range(30):
        if number == 10:
            process.kill()
            timer = threading.Timer(0.5, process.start)
            timer.start()
        ours, theirs = next(batches), next(expected)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert loader.state_dict()["samples_consumed"] == (number + 1) * section.batch_size
    timer.join()
    batches.close()


def test_only_a_limited_number_of_batches_is_in_flight(monkeypatch):
    requested = []

    def ask(self, connections, first, request):
        requested.append(request)
        return b'f{"num_samples": 9, "sequence_length": null}' if request is None else b"p" + b"{}"

    monkeypatch.setattr(InputWorkers, "ask", ask)
    samples = RemoteSamples(InputWorkers([("a", 1), ("b", 2)], "", b""), 2)
    monkeypatch.setattr("headwater.data.remote_samples._batch", lambda reply: reply)
    batches = samples.read_ahead(([number] for number in range(1000)), 3)
    for _ in range(5):
        next(batches)
    batches.close()
    assert len(requested) <= 1 + 5 + 2 * 3


def test_workers_of_other_data_and_workers_that_are_down(headwater, params, worker):
    process = worker()
    code, _, err = headwater("fit", params, option(process), "--seed", 7)
    assert code == 2 and "the input worker was started for other data" in err
    workers = InputWorkers([("127.0.0.1", process.port)], "x", b"0" * 32, patience_s=0.3)
    with pytest.raises(RankError, match=r"does not know the secret|refused"):
        RemoteSamples(workers, 1)
    process.kill()
    with pytest.raises(DataError, match="no input worker has answered"):
        RemoteSamples(workers, 1)
    process.start()


def damage(folder):
    """Copy data, and change a value of each sample in the copy."""
    for path in folder.glob("*.h5"):
        with h5py.File(path, "r+") as file:
            for number in range(len(file["data"])):
                file["data"][number, 0, 1] ^= 1


def test_a_damaged_file_of_a_worker_ends_the_run(headwater, params, data, tmp_path, worker):
    shutil.copytree(data / "train", tmp_path / "copy")
    params.write_text(params.read_text().replace(str(data / "train"), str(tmp_path / "copy")))
    process = worker()
    damage(tmp_path / "copy")
    code, _, err = headwater("fit", params, option(process))
    assert code == 2 and "sample is damaged" in err
    assert f"{tmp_path / 'copy'}/" in err and f"input worker on {platform.node()}" in err


@pytest.fixture
def serve():
    """Starts an input worker of this process for a data set, and returns its address."""
    started = []

    def start(samples):
        listener = socket.create_server(("127.0.0.1", 0))
        started.append(InputWorker({"it": samples}, listener, SECRET))
        threading.Thread(target=started[-1].serve, daemon=True).start()
        return listener.getsockname()

    yield start
    for each in started:
        each.close()


class Failing:
    """A data set whose reads raise an error."""

    sequence_length = None

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def __getitems__(self, draws):
        raise self.error


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (StoreError("x.h5: it is on fire", where="/x.h5", remedy="run"), "x.h5: it is on fire"),
        (OSError(errno.EIO, "Input/output error", "/x.h5"), "cannot be read: Input/output error"),
        (DataError("no such sample", where="/x.h5"), "no such sample"),
    ],
)
def test_errors_of_a_worker_reach_the_rank(serve, error, what):
    samples = RemoteSamples(InputWorkers([serve(Failing(error))], "it", SECRET, patience_s=100), 1)
    (found,) = samples.read_ahead([[0, 1]], 2)
    assert isinstance(found, DataError) and what in found.what
    assert found.where == f"/x.h5, input worker on {platform.node()}"


def test_a_rank_that_disconnects_leaves_no_message(serve, caplog):
    class Slow(Failing):
        def __getitems__(self, draws):
            asked.set()
            gone.wait(100)
            answered.set()
            return {"x": torch.zeros(1 << 20)}

    asked, gone, answered = threading.Event(), threading.Event(), threading.Event()
    threads = set(threading.enumerate())
    address = serve(Slow(None))
    connection = call(address, SECRET, "it", NUMBER, NUMBER, 100)
    connection.send_message(b"[0]").result()
    assert asked.wait(100)
    connection.close()
    gone.set()
    assert answered.wait(100)
    for thread in set(threading.enumerate()) - threads:
        if "_serve" in thread.name:
            thread.join(100)
    assert caplog.text == ""


def test_a_worker_that_is_closed_ends_after_its_read_and_not_before():
    class Slow(Failing):
        def __getitems__(self, draws):
            asked.set()
            assert may_end.wait(100)
            return {"x": torch.zeros(4)}

    asked, may_end = threading.Event(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    worker = InputWorker({"it": Slow(None)}, listener, SECRET)
    serving = threading.Thread(target=worker.serve, daemon=True)
    serving.start()
    reading, idle = (call(listener.getsockname(), SECRET, "it", NUMBER, NUMBER, 100) for _ in range(2))
    reading.send_message(b"[0]").result()
    assert asked.wait(100)
    worker.close()
    serving.join(0.1)
    assert serving.is_alive()
    may_end.set()
    serving.join(100)
    assert not serving.is_alive()
    reading.close()
    idle.close()


def test_a_worker_outlives_errors_of_single_connections():
    class Listener:
        """A socket whose first calls of `accept` fail; the last one is that of a closed socket."""

        def __init__(self):
            self.errors = [errno.ECONNABORTED, errno.EMFILE, errno.EINVAL]

        def accept(self):
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))

        def fileno(self):
            return 3

    listener = Listener()
    InputWorker({}, listener, b"").serve()
    assert listener.errors == []


def test_input_workers_of_each_rank():
    workers = [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    assert workers_of_rank(workers, 0, 2, None) == (workers, 2)
    assert workers_of_rank(workers, 1, 2, None) == ([*workers[2:], *workers[:2]], 2)
    assert workers_of_rank(workers, 1, 2, 1) == ([*workers[1:], *workers[:1]], 1)
    assert workers_of_rank(workers[:1], 3, 4, None) == (workers[:1], 1)
    assert workers_of_rank(workers, 0, 1, 9) == (workers, 4)


@pytest.mark.parametrize("text", ["node", "node:x", "node:99999", ""])
def test_malformed_addresses_of_workers(text):
    with pytest.raises(
        ConfigError, match=r"expected an address host:port(.|\n)*where: command line: --listen"
    ):
        read_place(text, "command line: --listen")
