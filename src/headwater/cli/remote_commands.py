"""`validate` and `plan` on an appliance: jobs whose output is printed here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from headwater.appliance.remote.address import Address
from headwater.appliance.remote.bundle import Bundle
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.run_link import linked_run
from headwater.appliance.remote.submission import RemoteSubmission, submit
from headwater.appliance.remote.workspace import MODEL_DIR
from headwater.appliance.types import Priority, read_labels
from headwater.cli.appliance_option import say
from headwater.cli.following import follow
from headwater.cli.jobs import current_umask
from headwater.cli.output import open_console
from headwater.cli.remote_jobs import python_folders
from headwater.cli.remote_params import PARAMS_FILE, bundle_params
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError

_DATA = ("fit", "validate", "validate_all")
_TRAINING = ("fit.train_dataloader", "fit.ckpt_path")


def validate_there(config: RunConfig, args: argparse.Namespace, address: Address) -> int:
    """Evaluate checkpoints of a run on an appliance; return the exit code.

    Args:
        config: the run.
        args: the arguments of `validate`.
        address: the appliance.

    Raises:
        ConfigError: if the run has no checkpoints there, and the params name none.
    """
    model_dir = config.init.model_dir
    run = linked_run(model_dir, address)
    names_checkpoint = config.validation is not None and config.validation.ckpt_path is not None
    if run is None and not names_checkpoint:
        raise ConfigError(
            f"the model_dir does not belong to a run on {address}",
            where=str(model_dir),
            remedy="train there first (headwater --appliance … fit), name a checkpoint with "
            "--checkpoint_path, or leave --appliance out",
        )
    words = ["--all"] if args.all else []
    if run is not None:
        config, options = _with_checkpoints_there(config)
        words += ["--model_dir", MODEL_DIR, *options]
    unread = (*_TRAINING, "validate" if args.all else "validate_all")
    return _run(config, args, address, ("validate", PARAMS_FILE, *words), unread, run=run)


def plan_there(config: RunConfig, args: argparse.Namespace, address: Address) -> int:
    """Print the plan that a run has on an appliance; return the exit code.

    Args:
        config: the run.
        args: the arguments of `plan`.
        address: the appliance.

    Raises:
        ConfigError: if an option needs files of this machine.
    """
    for name in ("png", "write_cluster", "cluster"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name} works only with files of this machine",
                where="--appliance",
                remedy=f"leave --{name} or --appliance out",
            )
    words: tuple[str, ...] = ("--recalibrate",) if args.recalibrate else ()
    if args.sequence_length is not None:
        words += ("--sequence_length", str(args.sequence_length))
    # The job gets as many CSXs as the run needs, because a plan is for the cores and devices of its job.
    num_csx = config.init.backend.cluster_config.num_csx
    return _run(config, args, address, ("plan", PARAMS_FILE, *words), _DATA, num_csx=num_csx)


def _with_checkpoints_there(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a run without the checkpoints in its model_dir, and options that name them on the appliance."""
    model_dir, words = config.init.model_dir.absolute(), []

    def there(path: Path) -> str | None:
        path = path.absolute()
        return f"{MODEL_DIR}/{path.relative_to(model_dir)}" if path.is_relative_to(model_dir) else None

    one, several = config.validation, config.validate_all
    if one is not None and one.ckpt_path is not None and (place := there(one.ckpt_path)) is not None:
        words.append(f"--trainer.validate.ckpt_path={place}")
        one = one.model_copy(update={"ckpt_path": None})
    if several is not None and several.ckpt_paths:
        places = [there(path) for path in several.ckpt_paths]
        if None not in places:
            words.append(f"--trainer.validate_all.ckpt_paths={json.dumps(places)}")
            several = several.model_copy(update={"ckpt_paths": None})
    return dataclasses.replace(config, validation=one, validate_all=several), words


def _run(
    config: RunConfig,
    args: argparse.Namespace,
    address: Address,
    command: tuple[str, ...],
    unread: Sequence[str],
    *,
    run: str | None = None,
    num_csx: int = 1,
) -> int:
    """Submit a command that writes no files, and print its output; return the exit code.

    Args:
        config: the params of the command.
        args: the arguments of the command line.
        address: the appliance.
        command: the words after `headwater`.
        unread: see `bundle_params`.
        run: name of the run on the appliance that the command reads.
        num_csx: CSXs of the job.
    """
    open_console(config)
    cluster = config.init.backend.cluster_config
    bundle = Bundle()
    params = bundle_params(config, bundle, unread)
    with tempfile.TemporaryDirectory() as folder, closing(Connection(address, say)) as connection:
        path = Path(folder, PARAMS_FILE)
        path.write_bytes(params)
        bundle.add(path, path.name)
        order = RemoteSubmission(
            command=command,
            is_headwater=True,
            bundle=bundle,
            python_paths=python_folders(bundle, cluster.python_paths or ()),
            run=run,
            only_reads=True,
            num_csx=num_csx,
            priority=Priority(cluster.job_priority),
            labels=read_labels(cluster.job_labels),
            umask=current_umask(),
        )
        job = submit(connection, order, say)
        say(f"job {job.name} on {connection.address}, log {job.log}")
        return follow(connection, job, None, args)
