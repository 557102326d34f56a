"""Jobs on an appliance: `fit` and `jobs submit` with `--appliance`, and `jobs attach`."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from headwater.appliance.remote.address import SCHEME, Address, read_address
from headwater.appliance.remote.bundle import Bundle
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.run_link import run_name
from headwater.appliance.remote.submission import RemoteSubmission, submit
from headwater.appliance.types import Job, read_labels, read_priority
from headwater.cli.appliance_option import say
from headwater.cli.following import folder_of, follow
from headwater.core.errors import ConfigError
from headwater.core.files import is_file

_CODE = (".py", ".pyi", ".toml", ".cfg", ".yaml", ".yml", ".json", ".txt", ".sh")
_CODE_BYTES = 1 << 20


def submit_command(args: argparse.Namespace, umask: int) -> int:
    """Submit the command of `jobs submit` to an appliance, with the files it names; return the exit code.

    Args:
        args: the arguments of `jobs submit`.
        umask: file mode creation mask of the job.

    Raises:
        ConfigError: if a file to send lies outside of the working folder, or the files are too large.
    """
    bundle = Bundle()
    add_command_files(bundle, args.command, args.upload)
    with closing(Connection(args.appliance, say)) as connection:
        connection.open()
        model_dir = args.model_dir and args.model_dir.expanduser().absolute()
        order = RemoteSubmission(
            command=tuple(args.command),
            is_headwater=False,
            bundle=bundle,
            python_paths=(".",),
            run=model_dir and run_name(model_dir, args.appliance),
            model_dir=model_dir,
            num_csx=args.num_csx,
            priority=read_priority(args.job_priority),
            labels=read_labels(args.job_labels),
            umask=umask,
        )
        return _submit(connection, order, args, follows=args.follow)


def fit_params(args: argparse.Namespace, params: bytes, order: RemoteSubmission, address: Address) -> int:
    """Submit a training run to an appliance, and follow it unless `--submit` is given; return the exit code.

    Args:
        args: the arguments of `fit`.
        params: the params file for the appliance.
        order: the job, without the params file and the name of the run.
        address: the appliance.
    """
    assert order.model_dir is not None, "a run has a model_dir"
    with tempfile.TemporaryDirectory() as folder, closing(Connection(address, say)) as connection:
        path = Path(folder, order.command[1])
        path.write_bytes(params)
        order.bundle.add(path, path.name)
        # This comes before the first write to the model_dir, because the other machine may be down.
        connection.open()
        named = dataclasses.replace(order, run=run_name(order.model_dir, address))
        return _submit(connection, named, args, follows=not args.submit)


def run_attach(args: argparse.Namespace) -> int:
    """Follow a job on an appliance; return the exit code."""
    if args.appliance is None:
        raise ConfigError(
            "headwater jobs attach follows a job on another machine, but no machine is named",
            where="command line",
            remedy="write --appliance ssh://host; for a job of this machine: headwater jobs logs -f JOB",
        )
    with closing(Connection(args.appliance, say)) as connection:
        answer = connection.ask("watch", name=args.name, position=0, phase=None, wait_s=0).header["answer"]
        job = Job.from_record(answer["job"])
        return follow(connection, job, args.model_dir or folder_of(answer["origin"], job), args)


def _submit(
    connection: Connection, order: RemoteSubmission, args: argparse.Namespace, *, follows: bool
) -> int:
    job = submit(connection, order, say)
    print(job.name, flush=True)
    say(f"job {job.name} on {connection.address}, log {job.log}")
    return follow(connection, job, order.model_dir, args) if follows else 0


def add_command_files(bundle: Bundle, command: Sequence[str], uploads: Sequence[Path]) -> None:
    """Add the files that a command needs to a bundle, under their paths in the working folder.

    These are the files that its words name, for a Python script also the code beside and below it, and the
    files and folders that the user lists.

    Args:
        bundle: receives the files.
        command: the command.
        uploads: further files and folders.

    Raises:
        ConfigError: if a listed file does not exist, or a file lies outside of the working folder.
    """
    here = Path.cwd()
    for word in command:
        path = Path(word)
        # A path outside of the working folder is a path on the appliance, so its file is not sent.
        if is_file(path) and path.resolve().is_relative_to(here):
            bundle.add(path, _relative(path, here))
            if path.suffix == ".py":
                folder = path.resolve().parent
                bundle.add(folder, _relative(folder, here), _is_code)
    for path in uploads:
        if not path.exists():
            raise ConfigError(f"{path} does not exist", where="--upload", remedy="correct the path")
        bundle.add(path, _relative(path, here))


def python_folders(bundle: Bundle, folders: Sequence[Path]) -> tuple[str, ...]:
    """Add the code in folders to a bundle, and return their places.

    Raises:
        ConfigError: if a folder does not exist.
    """
    places = []
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", where="python_paths", remedy="correct the path")
        places.append(f"code/{number}")
        bundle.add(folder, places[-1], _is_code)
    return tuple(places)


def address_of_params(text: str | None) -> Address | None:
    """Return the appliance that `mgmt_address` names; `None` if it is missing or not an address over SSH."""
    if text is None or not text.startswith(SCHEME):
        return None
    return read_address(text, where="mgmt_address")


def _is_code(path: Path) -> bool:
    return path.suffix in _CODE and path.stat().st_size <= _CODE_BYTES


def _relative(path: Path, here: Path) -> str:
    resolved = path.resolve()
    if not resolved.is_relative_to(here):
        raise ConfigError(
            "expected a file below the working folder",
            where=str(path),
            remedy="run the command in a folder that contains all files to send",
        )
    return resolved.relative_to(here).as_posix()
