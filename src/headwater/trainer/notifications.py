"""Messages about the end of a run: to a URL, to a command, to a mail server or to Slack."""

from __future__ import annotations

import json
import logging
import os
import smtplib
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from email.message import EmailMessage
from email.utils import localtime, make_msgid
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from headwater.config.sections import EmailConfig, NotificationConfig, SlackConfig
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.users import user_name
from headwater.trainer.callback import Callback, FitStart, StepEnd

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig

logger = logging.getLogger(__name__)

EMAIL_ENDPOINT, SLACK_URL = "CEREBRAS_NOTIFICATION_ENDPOINT", "HEADWATER_SLACK_URL"
"""Environment variables with the URLs of e-mail and Slack. The first has the same name in the Model Zoo."""
MAIL_FROM, MAIL_PASSWORD = "CEREBRAS_NOTIFICATION_MAILFROM", "CEREBRAS_NOTIFICATION_PASSWORD"
"""Environment variables with the sender of e-mails and its password, as in the Model Zoo."""
_URL_TIMEOUT_S, _COMMAND_TIMEOUT_S, _MAIL_TIMEOUT_S = 10.0, 60.0, 30.0
_TLS_PORT = 465
"""The port on which a mail server speaks TLS from the first byte. On other ports STARTTLS begins it."""

Message = dict[str, Any]
"""A message: `event` (complete, stopped or failed), `text`, `error`, `model_dir`, `step`, `end_step`, …"""


@contextmanager
def errors_as_warnings() -> Iterator[None]:
    """Log each error inside the context as a warning: a message must not change how the run ends."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - http.client and e-mail raise many kinds
        logger.warning("the notification was not sent: %s", reason(error))


def reason(error: BaseException) -> str:
    """Return why a message was not sent, without the URL and the words of the command: they may be secret."""
    match error:
        case HeadwaterError():
            return str(error)
        case urllib.error.HTTPError():
            return f"the URL answered with HTTP status {error.code}"
        case urllib.error.URLError(reason=OSError() as cause):
            return reason(cause)
        case smtplib.SMTPResponseException():
            return f"the mail server answered with code {error.smtp_code}"
        case subprocess.CalledProcessError():
            return f"the command ended with exit code {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"the command did not end within {_COMMAND_TIMEOUT_S:.0f} s"
        case OSError(strerror=str(text)):
            return f"{type(error).__name__}: {text}"
    return type(error).__name__


def post(url: str, body: Any) -> None:
    """Send a value as JSON to a URL. A failure is a warning."""
    with errors_as_warnings():
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        try:
            urllib.request.urlopen(request, timeout=_URL_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            error.close()  # the error holds the answer and its socket
            raise


def run_command(command: Sequence[str], text: str) -> None:
    """Run a command with a text as its input. A failure is a warning."""
    with errors_as_warnings():
        subprocess.run(
            command, input=text, text=True, check=True, timeout=_COMMAND_TIMEOUT_S, stdout=subprocess.DEVNULL
        )


def send_mail(config: EmailConfig, mailfrom: str, text: str) -> None:
    """Send an e-mail through the mail server of the params. A failure is a warning."""
    with errors_as_warnings():
        mail = _mail(config, text)
        mail["From"], mail["Date"], mail["Message-ID"] = mailfrom, localtime(), make_msgid()
        context, password = ssl.create_default_context(), os.environ.get(MAIL_PASSWORD)
        place = (config.server_name, config.port)
        with (
            smtplib.SMTP_SSL(*place, timeout=_MAIL_TIMEOUT_S, context=context)
            if config.port == _TLS_PORT
            else smtplib.SMTP(*place, timeout=_MAIL_TIMEOUT_S)
        ) as server:
            server.ehlo()  # the server names its extensions in the answer
            if config.port != _TLS_PORT and server.has_extn("starttls"):
                server.starttls(context=context)
            elif config.port != _TLS_PORT and password:
                raise ConfigError(
                    "the mail server offers no STARTTLS, so the password is not sent",
                    where=f"{place[0]}:{place[1]}",
                    remedy=f"use the port {_TLS_PORT}, or a mail server with TLS",
                )
            if password:
                server.login(mailfrom, password)
            server.send_message(mail)


@final
class Notification(Callback):
    """Sends a message when the training ends: after the last step, a request to stop, or an error.

    Args:
        config: the section of the params: a URL that gets the message as JSON, or a command that reads it.
        model_dir: folder of the run.
    """

    def __init__(self, config: NotificationConfig, model_dir: Path) -> None:
        self._config = config
        self._model_dir = model_dir
        self._step, self._end_step = 0, 0
        self._error: BaseException | None = None

    def on_fit_start(self, event: FitStart) -> None:
        self._step, self._end_step = event.start_step, event.end_step

    def on_step_end(self, event: StepEnd) -> None:
        self._step = event.step

    def on_fit_error(self, error: BaseException) -> None:
        # The first error is the one that the run raises.
        self._error = self._error if self._error is not None else error

    def on_fit_end(self) -> None:
        with errors_as_warnings():
            message = make_message(self._model_dir, self._step, self._end_step, self._error)
            sender = sender_of(self._config)
            if isinstance(self._config, EmailConfig) and sender:
                send_mail(self._config, sender, message["text"])
                return
            for body, text in bodies(self._config, message):
                if self._config.command:
                    run_command(self._config.command, text)
                else:
                    post(url_of(self._config), body)


def make_message(model_dir: Path, step: int, end_step: int, error: BaseException | None) -> Message:
    """Return the message about the end of a run.

    Args:
        model_dir: folder of the run.
        step: steps done.
        end_step: the last step of the run.
        error: the error that ended it; `None` without an error.
    """
    host, user = socket.gethostname(), user_name(os.geteuid())
    event = "failed" if error is not None else "complete" if step >= end_step else "stopped"
    ending = f"{event} after step {step} of {end_step}"
    text = f"Run {model_dir.absolute()} of {user} on {host}: {ending}"
    return {
        "event": event,
        "text": text if error is None else f"{text}: {error or type(error).__name__}",
        "error": None if error is None else str(error) or type(error).__name__,
        "model_dir": str(model_dir.absolute()),
        "step": step,
        "end_step": end_step,
        "user": user,
        "host": host,
    }


def bodies(config: NotificationConfig, message: Message) -> Iterable[tuple[Any, str]]:
    """Yield each message to send, as JSON for a URL and as text for a command: one per channel of Slack."""
    if isinstance(config, EmailConfig):
        yield _email(config, message)
    elif isinstance(config, SlackConfig):
        for channel in config.channels:
            body = {"channel": channel, "text": message["text"]}
            yield body, json.dumps(body)
    else:
        yield message, json.dumps(message)


def _email(config: EmailConfig, message: Message) -> tuple[Any, str]:
    """Return an e-mail as JSON with the fields of the Model Zoo, and as `sendmail -t` reads it."""
    body = {"mailto": list(config.mailto), "subject": config.subject, "body": message["text"]}
    return body, _mail(config, message["text"]).as_string()


def _mail(config: EmailConfig, text: str) -> EmailMessage:
    mail = EmailMessage()
    mail["To"], mail["Subject"] = ", ".join(config.mailto), config.subject
    mail.set_content(text)
    return mail


def sender_of(config: NotificationConfig) -> str | None:
    """Return the sender of an e-mail that goes to a mail server; `None` for every other notification."""
    if not isinstance(config, EmailConfig) or config.url or config.command:
        return None
    return config.mailfrom or os.environ.get(MAIL_FROM)


def url_of(config: NotificationConfig) -> str:
    """Return the URL that gets the message.

    Raises:
        ConfigError: if neither the params nor the environment has one, or if it is not of HTTP.
    """
    variable = {EmailConfig: EMAIL_ENDPOINT, SlackConfig: SLACK_URL}.get(type(config))
    found = config.url or (variable and os.environ.get(variable))
    if not found:
        raise ConfigError(
            "the notification has no URL and no command",
            where="trainer.init.callbacks",
            remedy=_remedy(config, variable),
        )
    if not found.startswith(("http://", "https://")):
        # The error does not show the text, because it may be a secret.
        raise ConfigError(
            "expected a URL that begins with http:// or https://",
            where="trainer.init.callbacks" if config.url else variable,
            remedy="copy the whole address of the hook",
        )
    return found


def _remedy(config: NotificationConfig, variable: str | None) -> str:
    if isinstance(config, EmailConfig):
        return f"write mailfrom, notification_endpoint or command, or set {MAIL_FROM} or {variable}"
    return f"write url or command, or set {variable}" if variable else "write url or command"


def make_notifications(init: CommonInitConfig) -> list[Callback]:
    """Return a callback for each notification in the params.

    Raises:
        ConfigError: if one has no command and no URL, or a URL that is not of HTTP.
    """
    for config in init.notifications:
        if not config.command and not sender_of(config):
            url_of(config)
    return [Notification(config, init.model_dir) for config in init.notifications]
