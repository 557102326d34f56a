"""E-mails at the end of a run, as real mail servers on this machine get them."""

import socket
import ssl
import subprocess
from email import message_from_bytes
from email.policy import default

import pytest
from test_notifications import end

from headwater.config.sections import EmailConfig
from headwater.core.errors import ConfigError
from headwater.trainer.notifications import make_notifications

controller = pytest.importorskip("aiosmtpd.controller")
smtp = pytest.importorskip("aiosmtpd.smtp")


class Mailbox:
    """Keeps the e-mails that a server gets, and the passwords that it is asked to accept."""

    def __init__(self):
        self.mails, self.senders, self.logins = [], [], []

    async def handle_DATA(self, server, session, envelope):
        self.mails.append(message_from_bytes(envelope.content, policy=default))
        self.senders.append((envelope.mail_from, envelope.rcpt_tos))
        return "250 OK"

    def authenticate(self, server, session, envelope, mechanism, data):
        self.logins.append((data.login.decode(), data.password.decode()))
        return smtp.AuthResult(success=data.password == b"right", handled=False)


@pytest.fixture
def mailbox(monkeypatch):
    for name in ("MAILFROM", "PASSWORD", "ENDPOINT"):
        monkeypatch.delenv(f"CEREBRAS_NOTIFICATION_{name}", raising=False)
    return Mailbox()


@pytest.fixture
def serve(mailbox):
    """Starts a mail server with some options, and returns its port."""
    servers = []

    def start(**options):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = controller.Controller(mailbox, hostname="127.0.0.1", port=port, ready_timeout=100, **options)
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A certificate for this machine that clients trust; returns the context of a server."""
    key, place = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", place],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(place))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place, key)
    return context


def email(port, **options):
    return EmailConfig(
        mailto=("a@example.org", "b@example.org"), server_name="127.0.0.1", port=port, **options
    )


def test_a_mail_server_gets_the_end_of_a_run(serve, mailbox, tmp_path):
    end(email(serve(), mailfrom="me@example.org", subject="done"), tmp_path)
    (mail,) = mailbox.mails
    assert mailbox.senders == [("me@example.org", ["a@example.org", "b@example.org"])]
    assert (mail["From"], mail["To"]) == ("me@example.org", "a@example.org, b@example.org")
    assert mail["Subject"] == "done" and mail["Date"] and mail["Message-ID"]
    assert "complete after step 4 of 4" in mail.get_content()


def test_the_sender_may_be_in_the_environment(serve, mailbox, tmp_path, monkeypatch):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_MAILFROM", "env@example.org")
    end(email(serve()), tmp_path)
    assert mailbox.senders[0][0] == "env@example.org"


def test_a_password_is_sent_after_starttls(serve, mailbox, certificate, tmp_path, monkeypatch, caplog):
    port = serve(
        tls_context=certificate, auth_required=True, authenticator=mailbox.authenticate, require_starttls=True
    )
    for password in ("right", "wrong"):
        monkeypatch.setenv("CEREBRAS_NOTIFICATION_PASSWORD", password)
        end(email(port, mailfrom="me@example.org"), tmp_path)
    assert mailbox.logins[0] == ("me@example.org", "right") and len(mailbox.mails) == 1
    assert "code 535" in caplog.text and "wrong" not in caplog.text


def test_a_password_is_not_sent_without_tls(serve, mailbox, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_PASSWORD", "right")
    port = serve(authenticator=mailbox.authenticate, auth_require_tls=False)
    end(email(port, mailfrom="me@example.org"), tmp_path)
    assert not mailbox.logins and not mailbox.mails and "STARTTLS" in caplog.text


def test_a_server_whose_certificate_is_not_trusted_gets_no_password(
    serve, mailbox, certificate, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CEREBRAS_NOTIFICATION_PASSWORD", "right")
    monkeypatch.setenv("SSL_CERT_FILE", "/dev/null")
    end(email(serve(tls_context=certificate), mailfrom="me@example.org"), tmp_path)
    assert not mailbox.mails and not mailbox.logins and "certificate" in caplog.text.lower()


def test_a_mail_server_that_is_gone_is_a_warning(mailbox, tmp_path, caplog):
    end(email(9, mailfrom="me@example.org"), tmp_path)
    assert len(caplog.records) == 1 and "refused" in caplog.text


def test_an_e_mail_needs_exactly_one_way_to_send_it(mailbox, tmp_path):
    class Init:
        model_dir, notifications = tmp_path, [email(9)]

    with pytest.raises(ConfigError, match="no URL and no command") as error:
        make_notifications(Init)
    assert "mailfrom" in error.value.remedy
    Init.notifications = [email(9, mailfrom="me@example.org")]
    assert len(make_notifications(Init)) == 1
    with pytest.raises(ValueError, match="got several"):
        email(9, mailfrom="me@example.org", command=("true",))
