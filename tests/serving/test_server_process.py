"""Processes of servers: tokens, ports, the end by a signal, and models that cannot be opened."""

import contextlib
import os
import signal
import subprocess
import sys

import httpx
import pytest
from serving_samples import PATIENCE_S, ServerProcess, get, post

from headwater.cli.main import main
from headwater.core.errors import ConfigError
from headwater.serving.process import Address, is_loopback

LONG = {"prompt": "The", "max_tokens": 200, "temperature": 0}
TOKEN = "0123456789abcdef0123456789abcdef"


def ask(url, **settings):
    return post(f"{url}/v1/completions", json={**LONG, **settings})


@contextlib.contextmanager
def begun(url, **settings):
    """Yield the events of an answer that is streamed, after its first event."""
    body = {**LONG, "stream": True, **settings}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_sigterm_finishes_requests_that_have_begun(folders):
    with ServerProcess(folders["long"], "--drain_seconds", "200") as server:
        with begun(server.url) as lines:
            server.process.send_signal(signal.SIGTERM)
            *_, last, end = filter(None, lines)
        code, error = server.stop()
        with pytest.raises(httpx.ConnectError):
            ask(server.url)
    progress = [line for line in error.splitlines() if line.endswith(" s so far)")]  # of a busy machine
    assert (code, error.splitlines()) == (0, progress)
    assert end == "data: [DONE]" and '"finish_reason":"length"' in last


def test_clients_of_a_killed_server_get_an_error_and_do_not_hang(folders):
    # The answer takes a minute, so a test that stalls still kills the server during the answer.
    with ServerProcess(folders["long"]) as server, begun(server.url, max_tokens=30_000) as lines:
        server.stop(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)


def test_a_server_with_a_token_answers_only_those_who_send_it(folders):
    with ServerProcess(folders["small"], "--host", "0.0.0.0", token=TOKEN) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            refused = get(f"{url}/v1/models", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        given = get(f"{url}/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        assert [model["id"] for model in given.json()["data"]] == ["small"]
        assert get(f"{url}/health").status_code == 200
        assert get(f"{url}/metrics").status_code == 401
        assert "Headwater chat" in get(url).text


def test_other_addresses_than_loopback_need_a_long_token():
    assert is_loopback("localhost") and is_loopback("127.0.0.9") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    with pytest.raises(ConfigError, match="expected a token, because other machines"):
        Address("0.0.0.0", 80)
    with pytest.raises(ConfigError, match="at least 16 ASCII characters"):
        Address("0.0.0.0", 80, "short")
    with pytest.raises(ConfigError, match="port from 0 to 65535"):
        Address("localhost", 70_000)


def failed(capsys, *words):
    """Return the error of a command line."""
    assert main([str(word) for word in ("serve", *words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("token", ["", "secret", "tokén of more than 16"])
@pytest.mark.parametrize("place", ["HEADWATER_TOKEN", "--token_file"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_bad_token_is_refused_where_it_was_set(token, place, host, tmp_path, monkeypatch, capsys):
    """An empty variable is refused too: otherwise the server would need no token, which the user wanted."""
    words = ["--host", host, "--port", 0]
    if place == "--token_file":
        (tmp_path / "token").write_text(token)
        words += [place, tmp_path / "token"]
    else:
        monkeypatch.setenv(place, token)
    error = failed(capsys, tmp_path, *words)
    found = f"one of {len(token)}" if token.isascii() else "other characters"
    assert f"expected a token of at least 16 ASCII characters, got {found}" in error
    assert f"where: {place}" in error
    assert "remedy: make one with: openssl rand -hex 32" in error


def test_a_port_in_use_is_an_error_before_the_model_is_opened(server, folders, capsys):
    port = server.url.rpartition(":")[2]
    error = failed(capsys, folders["small"], "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}" in error
    assert "name another port with --port" in error


@pytest.mark.parametrize("words", [("--drain_seconds", "-1"), ("--max_sequence_length", "0")])
def test_numbers_out_of_range_are_refused(words, folders, capsys):
    assert main(["serve", str(folders["small"]), "--port", "0", *words]) == 2
    said = capsys.readouterr().err
    assert "expected at least" in said and words[0].removeprefix("--") in said


def test_models_that_cannot_be_served(folders, tmp_path, capsys):
    assert "expected a model to serve" in failed(capsys, "--port", 0)
    assert "a different name" in failed(capsys, folders["small"], folders["small"], "--port", 0)
    assert "a model name of printable characters" in failed(capsys, os.fsdecode(b"m\xff"), "--port", 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "remedy" in failed(capsys, empty, "--port", 0)
    (empty / "config.json").write_bytes((folders["small"] / "config.json").read_bytes())
    (empty / "tokenizer.json").write_bytes((folders["small"] / "tokenizer.json").read_bytes())
    assert "the folder of the model has no weights" in failed(capsys, empty, "--port", 0)
    assert "the token cannot be read" in failed(capsys, empty, "--token_file", tmp_path / "none")


def test_a_missing_package_is_named(folders):
    code = (
        "import sys; sys.modules['uvicorn'] = None; from headwater.cli.main import main; "
        f"sys.exit(main(['serve', {str(folders['small'])!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'headwater[serve]'" in done.stderr
