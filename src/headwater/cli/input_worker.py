"""`headwater input_worker`: read the data of a run for its ranks, also on other hosts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from headwater.appliance.remote.input_hosts import READY
from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.config.run import load_params
from headwater.core.errors import ConfigError
from headwater.core.signals import handled
from headwater.data.input_worker import InputWorker
from headwater.data.remote_samples import Address
from headwater.fabric.secret import file_secret
from headwater.fabric.switchboard import listen_at
from headwater.trainer.input_workers import data_of_run, read_place

if TYPE_CHECKING:
    from headwater.data.source import Samples

FROM_STDIN = "-"
"""Stands for PARAMS in the command with which a run starts a worker on another host."""
_BACKLOG = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater input_worker`."""
    parser.description = (
        "Read and batch the samples of a run, and send them to its ranks. Give it the params and options of "
        "the run. It can be ended and started again at any time: the ranks wait, and get the same batches. "
        "headwater fit starts workers itself on hosts that input_workers names as ssh://host."
    )
    parser.usage = f"headwater input_worker [-h] --listen HOST:PORT {USAGE}"
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="address of this host at which the ranks reach the worker; port 0 for a free one",
    )
    add_params_arguments(parser, {"model", "data_dir", "batch_size", "seed"})


def run(args: argparse.Namespace) -> int:
    """Serve batches until SIGTERM or Ctrl-C; return the exit code."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    if args.params == FROM_STDIN:
        return _serve_run()
    if args.listen is None:
        raise ConfigError(
            "expected the address at which the ranks reach the worker",
            where="command line",
            remedy="write --listen HOST:PORT",
        )
    host, port = read_place(args.listen, "command line: --listen")
    data = data_of_run(read_params(args))
    secret = file_secret(os.environ)
    with _serving(data, (host, port), secret) as worker:
        worker.serve()
    return 0


def _serve_run() -> int:
    """Serve the run that has started this worker over SSH. Its params come by stdin; it ends with stdin."""
    order = json.loads(sys.stdin.readline())
    if order["version"] != version("headwater"):
        raise ConfigError(
            f"expected headwater {order['version']}, which the run has, got {version('headwater')}",
            where=platform.node(),
            remedy="install the same version on both hosts",
        )
    with tempfile.TemporaryDirectory() as folder:
        params = Path(folder, "params.yaml")
        params.write_text(order["params"], encoding="utf-8")
        data = data_of_run(load_params(params))
    # SSH_CONNECTION contains the address of this host that the run has used to reach it.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    host = connection[2] if len(connection) == 4 else "127.0.0.1"
    with _serving(data, (host, order["port"]), order["secret"].encode()) as worker:

        def close_at_end() -> None:
            sys.stdin.read()
            worker.close()

        threading.Thread(target=close_at_end, daemon=True).start()
        worker.serve()
    return 0


@contextmanager
def _serving(data: Mapping[str, Samples], place: Address, secret: bytes) -> Iterator[InputWorker]:
    """Listen at an address, print it, and yield a worker that SIGTERM and SIGINT stop."""
    try:
        listener = listen_at(*place, _BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {place[0]}:{place[1]}: {error.strerror or error}",
            where="--listen",
            remedy="name an address of this host and a free port",
        ) from error
    worker = InputWorker(data, listener, secret)

    def stop(number: int, frame: FrameType | None) -> None:
        worker.close()

    with handled({signal.SIGTERM: stop, signal.SIGINT: stop}):
        samples = ", ".join(str(len(each)) for each in data.values())
        host, port = listener.getsockname()[:2]
        print(f"{READY}{samples} samples at {host}:{port}", flush=True)
        yield worker
