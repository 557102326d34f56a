"""`headwater input_worker`: read the data of a run for its ranks, also on other hosts."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from types import FrameType

from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.core.errors import ConfigError
from headwater.core.signals import handled
from headwater.data.input_worker import InputWorker
from headwater.fabric.secret import file_secret
from headwater.fabric.switchboard import listen_at
from headwater.trainer.input_workers import data_of_run, read_place

_BACKLOG = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater input_worker`."""
    parser.description = (
        "Read and batch the samples of a run, and send them to its ranks. Give it the params and options of "
        "the run. It can be ended and started again at any time: the ranks wait, and get the same batches."
    )
    parser.usage = f"headwater input_worker [-h] --listen HOST:PORT {USAGE}"
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="address of this host at which the ranks reach the worker; port 0 for a free one",
    )
    add_params_arguments(parser, {"model", "data_dir", "batch_size", "seed"})


def run(args: argparse.Namespace) -> int:
    """Serve batches until SIGTERM or Ctrl-C; return the exit code."""
    host, port = read_place(args.listen)
    data = data_of_run(read_params(args))
    secret = file_secret(os.environ)
    try:
        listener = listen_at(host, port, _BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {args.listen}: {error.strerror or error}",
            where="--listen",
            remedy="name an address of this host and a free port",
        ) from error
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    worker = InputWorker(data, listener, secret)

    def stop(number: int, frame: FrameType | None) -> None:
        worker.close()

    with handled({signal.SIGTERM: stop, signal.SIGINT: stop}):
        samples = ", ".join(str(len(each)) for each in data.values())
        host, port = listener.getsockname()[:2]
        print(f"serving {samples} samples at {host}:{port}", flush=True)
        worker.serve()
    return 0
