"""`headwater board` as a user types it."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from headwater.cli.board import chosen_token
from headwater.cli.main import main
from headwater.core.errors import ConfigError


def answer(address, path, token):
    request = urllib.request.Request(address + path, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=100) as found:
        return json.load(found)


@pytest.mark.real_start
def test_the_command_serves_runs_and_ends_with_an_interrupt(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.jsonl").touch()
    words = [sys.executable, "-m", "headwater", "board", tmp_path, "--port", "0", "--no_jobs"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        address, token = process.stdout.readline().split()[-1].split("#token=")
        assert [run["name"] for run in answer(address, "api/state", token)["runs"]] == ["run"]
        for path, given in (("api/state", "wrong"), ("api/events", "")):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                answer(address, path, given)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0


@pytest.mark.real_start
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_answer_ends_the_command_quietly(number, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.jsonl").touch()
    words = [sys.executable, "-m", "headwater", "board", tmp_path, "--port", "0", "--no_jobs"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address, token = process.stdout.readline().split()[-1].split("#token=")
        request = urllib.request.Request(f"{address}api/events", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=100) as events:  # an answer that never ends by itself
            assert events.readline().startswith(b"data: ")
            process.send_signal(number)
            assert process.wait(100) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        (["missing"], "expected a folder of runs", "name a model_dir"),
        ([".", "--port", "70000"], "from 0 to 65535", "--port"),
        ([".", "--host", "0.0.0.0"], "needs a token", "HEADWATER_BOARD_TOKEN"),
        ([".", "--prot", "1"], "unknown option --prot", "--port"),
    ],
)
def test_wrong_options_are_explained(options, message, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["board", *options, "--no_jobs"]) == 2
    text = capsys.readouterr().err
    assert message in text and remedy in text


def test_a_short_token_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADWATER_BOARD_TOKEN", "short")
    assert main(["board", str(tmp_path), "--no_jobs"]) == 2
    text = capsys.readouterr().err
    assert "at least 16 letters and digits" in text and "secrets" in text


def test_a_port_in_use_is_explained(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["board", str(tmp_path), "--port", port, "--no_jobs"]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_the_page_needs_a_given_token_only_if_other_machines_reach_it():
    given = "0123456789abcdef"
    assert chosen_token(given, "0.0.0.0") == given
    assert len(chosen_token(None, "127.0.0.1")) == 64 and len(chosen_token(None, "::1")) == 64
    assert chosen_token(None, "localhost") != chosen_token(None, "localhost")
    with pytest.raises(ConfigError, match="other machines can reach"):
        chosen_token(None, "::")
