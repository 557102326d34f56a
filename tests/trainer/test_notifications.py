"""Notifications at the end of a run, as a real HTTP server and real commands get them."""

import gc
import json
import os
import socket
import sys
import threading
from email import message_from_string
from email.policy import default
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from test_callbacks import PLAN, step

from headwater.config.sections import EmailConfig, NotificationConfig, SlackConfig
from headwater.core.errors import ConfigError, NonFiniteError
from headwater.trainer.callback import FitStart
from headwater.trainer.notifications import Notification, url_of


@pytest.fixture
def server():
    """An HTTP server on this machine; `requests` has what it got, and `status` is its answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.server.requests.append((self.headers["content-type"], json.loads(body)))
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.status = [], 200
        server.url = f"http://127.0.0.1:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def end(config, folder, *, steps=4, error=None):
    notification = Notification(config, folder)
    notification.on_fit_start(FitStart(0, 4, PLAN))
    for number in range(1, steps + 1):
        notification.on_step_end(step(number))
    if error is not None:
        notification.on_fit_error(error)
    notification.on_fit_end()


@pytest.mark.parametrize(
    ("steps", "error", "event"),
    [(4, None, "complete"), (2, None, "stopped"), (2, NonFiniteError("the loss is NaN"), "failed")],
)
def test_a_url_gets_the_end_of_a_run_as_json(server, tmp_path, steps, error, event):
    end(NotificationConfig(url=server.url), tmp_path, steps=steps, error=error)
    ((kind, body),) = server.requests
    assert kind == "application/json"
    assert (body["event"], body["step"], body["end_step"]) == (event, steps, 4)
    assert body["model_dir"] == str(tmp_path) and f"{event} after step {steps} of 4" in body["text"]
    assert body["error"] == (None if error is None else "the loss is NaN")


def test_slack_gets_a_message_for_each_channel(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_SLACK_URL", server.url)
    end(SlackConfig(channels=("#training", "U123")), tmp_path)
    assert [body["channel"] for _, body in server.requests] == ["#training", "U123"]
    assert all("complete after step 4 of 4" in body["text"] for _, body in server.requests)


def test_the_endpoint_of_e_mails_gets_the_fields_of_the_model_zoo(server, tmp_path):
    config = EmailConfig(mailto=("one@example.org", "two@example.org"), notification_endpoint=server.url)
    end(config, tmp_path)
    ((_, body),) = server.requests
    assert body["mailto"] == ["one@example.org", "two@example.org"]
    assert body["subject"] == "Headwater notification" and "complete" in body["body"]


def test_a_command_reads_an_e_mail(tmp_path):
    program = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    config = EmailConfig(
        mailto=("é@example.org",), command=(sys.executable, "-c", program, str(tmp_path / "mail"))
    )
    end(config, tmp_path)
    mail = message_from_string((tmp_path / "mail").read_text(), policy=default)
    assert mail["To"] == "é@example.org" and mail["Subject"] == "Headwater notification"
    assert "complete after step 4 of 4" in mail.get_content()


def test_a_failed_notification_is_a_warning(server, tmp_path, caplog):
    server.status = 500
    end(NotificationConfig(url=server.url), tmp_path)
    assert all(each.isclosed() for each in gc.get_objects() if type(each) is HTTPResponse)
    end(NotificationConfig(url="http://127.0.0.1:9/secret"), tmp_path)
    end(NotificationConfig(command=("/does/not/exist",)), tmp_path)
    end(NotificationConfig(command=("false",)), tmp_path)
    end(NotificationConfig(command=("false", "secret")), tmp_path)
    end(NotificationConfig(url="http://127.0.0.1:9/secret word"), tmp_path)  # http.client.InvalidURL
    end(EmailConfig(mailto=("a@example.org",), subject="secret\ntext", command=("true",)), tmp_path)
    assert len(caplog.records) == 7 and "secret" not in caplog.text
    assert "HTTP status 500" in caplog.text and "exit code 1" in caplog.text and "refused" in caplog.text


def test_an_answer_that_is_not_http_is_a_warning(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"secret\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        end(NotificationConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}/"), tmp_path)
        thread.join()
    assert len(caplog.records) == 1 and "secret" not in caplog.text


def test_a_user_without_a_name_gets_a_message(server, tmp_path, monkeypatch):
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 3_000_000_000)
    monkeypatch.setattr(os, "getuid", os.geteuid)
    end(NotificationConfig(url=server.url), tmp_path)
    assert server.requests[0][1]["user"] == "3000000000"


def test_the_first_error_is_the_one_in_the_message(server, tmp_path):
    notification = Notification(NotificationConfig(url=server.url), tmp_path)
    for text in ("first", "second"):
        notification.on_fit_error(NonFiniteError(text))
    notification.on_fit_end()
    assert server.requests[0][1]["error"] == "first"


def test_a_notification_without_a_way_is_refused(monkeypatch):
    monkeypatch.delenv("HEADWATER_SLACK_URL", raising=False)
    with pytest.raises(ConfigError, match="no URL and no command") as error:
        url_of(SlackConfig(channels=("a",)))
    assert "HEADWATER_SLACK_URL" in error.value.remedy
    with pytest.raises(ValueError, match="got both"):
        NotificationConfig(url="http://host", command=("true",))


def test_a_variable_without_the_url_of_http_is_refused(monkeypatch):
    monkeypatch.setenv("HEADWATER_SLACK_URL", "hooks.example.org/secret")
    with pytest.raises(ConfigError, match="begins with http://") as error:
        url_of(SlackConfig(channels=("a",)))
    assert "HEADWATER_SLACK_URL" in str(error.value) and "secret" not in str(error.value)
