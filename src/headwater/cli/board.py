"""`headwater board`: a web page that shows runs and jobs while they happen."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import secrets
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.appliance.folder import find_folder
from headwater.appliance.open import open_queue
from headwater.core.errors import ConfigError, RunError
from headwater.core.packages import importing
from headwater.serving.process import run_until_signal

if TYPE_CHECKING:
    from headwater.board.jobs import Jobs

_TOKEN = "HEADWATER_BOARD_TOKEN"
_SHORTEST_TOKEN = 16
_PORT, _LAST_PORT = 6060, 65535
_SWITCH_S = 0.001
"""Switch interval of the interpreter: how long a request waits for the thread that reads histories."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater board`."""
    parser.description = (
        "Serve a web page that shows all runs below a folder and the jobs of the queue, live. The command "
        "prints the address of the page. It ends with Ctrl-C (SIGINT) or SIGTERM; the runs and jobs continue."
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a model_dir, or a folder with model_dirs"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=_PORT,
        metavar="N",
        help="port to listen on; 0: any free one (%(default)s)",
    )
    parser.add_argument("--no_jobs", action="store_true", help="do not show the jobs of the queue")
    parser.add_argument(
        "--queue_dir", type=Path, metavar="DIR", help="folder of the queue (or HEADWATER_QUEUE_DIR)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until SIGINT (Ctrl-C) or SIGTERM arrives; return the exit code."""
    with importing("headwater board", "board"):
        import uvicorn

        from headwater.board.app import make_app
    from headwater.board.board import Board

    token = chosen_token(os.environ.get(_TOKEN), args.host)
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as stack:
        jobs = None if args.no_jobs else _open_jobs(args.queue_dir)
        if jobs is not None:
            stack.callback(jobs.close)
        board = stack.enter_context(Board(args.folder.expanduser()))
        listener = stack.enter_context(listen(args.host, args.port))
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            make_app(board, jobs, token), access_log=False, log_config=None, timeout_graceful_shutdown=1
        )
        port = listener.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"board of {args.folder}: http://{host}:{port}/#token={token}", flush=True)
        run_until_signal(uvicorn.Server(config), listener)
    return 0


def chosen_token(given: str | None, host: str) -> str:
    """Return the token: the given one, or a new one if only this machine can reach the page.

    Raises:
        ConfigError: if other machines can reach `host` and no token is given, or if the token is too short.
    """
    if given is not None:
        if len(given) < _SHORTEST_TOKEN or not given.isascii() or not given.isalnum():
            raise ConfigError(
                f"expected a token of at least {_SHORTEST_TOKEN} letters and digits",
                where=_TOKEN,
                remedy="make one: python -c 'import secrets; print(secrets.token_hex())'",
            )
        return given
    if not _is_loopback(host):
        raise ConfigError(
            f"other machines can reach {host}, so the page needs a token",
            where="--host",
            remedy=f"set {_TOKEN}; or listen on 127.0.0.1 and use ssh -L {_PORT}:127.0.0.1:{_PORT}",
        )
    return secrets.token_hex()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_jobs(folder: Path | None) -> Jobs | None:
    """Return the jobs of the queue; `None` until a queue exists."""
    from headwater.board.jobs import Jobs

    if not os.environ.get("HEADWATER_QUEUE") and not find_folder(folder).exists:
        return None
    return Jobs(lambda: open_queue(None, folder))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: if there is no such port.
        RunError: if the address is in use or does not exist.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(
            f"expected a port from 0 to {_LAST_PORT}, got {port}",
            where="--port",
            remedy="leave --port out, or use 0 for any free port",
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RunError(
            f"the page cannot be served: {error.strerror or error}",
            where=f"{host}:{port}",
            remedy="choose another port with --port, or 0 for any free one",
        ) from error
