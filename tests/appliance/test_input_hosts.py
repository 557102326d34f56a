"""Input workers that a run starts over a real SSH server on loopback."""

import itertools
import os

import psutil
import pytest
from queue_samples import wait_until
from test_remote_jobs import PARAMS, data, losses  # noqa: F401 (a fixture)

from headwater.cli.main import main
from headwater.data.remote_samples import InputWorkers
from headwater.trainer.input_workers import STARTED

WORKERS = "--trainer.fit.train_dataloader.input_workers=[ssh://wafer]"


@pytest.fixture
def params(tmp_path, data, monkeypatch):  # noqa: F811
    """A params file with a relative path of the data, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(PARAMS.format(folder=tmp_path, data=os.path.relpath(data, tmp_path)))
    return tmp_path / "p.yaml"


def input_workers(sshd):
    """The processes of input workers that the SSH server has started."""
    found = []
    for process in psutil.Process(sshd._process.pid).children(recursive=True):
        try:
            if process.cmdline()[-2:] == ["input_worker", "-"] and "python" in process.name():
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(params, folder, *words):
    assert main(["fit", str(params), "--model_dir", str(folder), *words]) == 0
    return losses(folder)


def test_a_run_starts_workers_and_starts_killed_ones_again(sshd, params, tmp_path, monkeypatch, capfd):
    expected = run(params, tmp_path / "plain")
    ask, counts, calls = InputWorkers.ask, [], itertools.count(1)

    def ask_and_kill(self, *words):
        if next(calls) == 4:  # of two threads
            counts.append(len(input_workers(sshd)))
            for process in input_workers(sshd):
                process.kill()
        return ask(self, *words)

    monkeypatch.setattr(InputWorkers, "ask", ask_and_kill)
    options = (WORKERS, "--trainer.init.backend.cluster_config.num_workers_per_csx=2")
    assert run(params, tmp_path / "with", *options) == expected
    assert counts == [2] and STARTED not in os.environ
    assert wait_until(lambda: not input_workers(sshd)), "they end with the run"
    assert "had ended, and was started again" in capfd.readouterr().err
    saved = (tmp_path / "with" / "params.yaml").read_text()
    assert "ssh://wafer" in saved


def test_two_ranks_use_the_workers(sshd, params, tmp_path):
    expected = run(params, tmp_path / "plain", "--num_csx", "2")
    assert run(params, tmp_path / "with", "--num_csx", "2", WORKERS) == expected
    assert wait_until(lambda: not input_workers(sshd))


def test_workers_that_cannot_be_started(sshd, params, tmp_path, monkeypatch, capfd):
    words = ["fit", str(params), WORKERS]
    monkeypatch.setenv("HEADWATER_APPLIANCE_COMMAND", "/nowhere/headwater")
    assert main(words) == 2 or "headwater was not found there" in capfd.readouterr().err
    monkeypatch.setenv("HEADWATER_APPLIANCE_COMMAND", f"{sshd.command} jobs; false")
    code = main(words)
    assert code != 0 and "ssh://wafer" in capfd.readouterr().err
    monkeypatch.setenv("HEADWATER_SSH", "no-such-ssh")
    assert main(words) == 2 and "cannot start no-such-ssh" in capfd.readouterr().err
    assert main(["validate", str(params), WORKERS, *words[2:]]) == 2


def test_data_that_are_missing_on_the_input_host(sshd, params, tmp_path, capfd):
    text = params.read_text()
    params.write_text(text[: text.index("data_dir")] + "data_dir: /far/away, batch_size: 8}\n")
    assert main(["fit", str(params), WORKERS]) == 2
    err = capfd.readouterr().err
    assert "the input worker does not start" in err and "/far/away" in err and "ssh://wafer" in err
