"""`headwater fit`: train a model."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from headwater.appliance.open import open_queue
from headwater.appliance.remote.address import Address
from headwater.appliance.remote.bundle import Bundle
from headwater.appliance.remote.submission import RemoteSubmission
from headwater.appliance.remote.workspace import MODEL_DIR
from headwater.appliance.types import Priority, Submission, read_labels
from headwater.cli import without_training
from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.cli.following import add_following_options
from headwater.cli.input_hosts import input_workers
from headwater.cli.jobs import current_umask, submit_job
from headwater.cli.output import open_console
from headwater.cli.remote_jobs import address_of_params, fit_params, python_folders
from headwater.cli.remote_params import PARAMS_FILE, bundle_params
from headwater.config.run import RunConfig
from headwater.config.sections import CallbackConfig, OpProfilerConfig
from headwater.config.user import UserConfig
from headwater.core.errors import ConfigError
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.placement import JOB
from headwater.fabric.membership import current
from headwater.trainer.ranks import launch
from headwater.trainer.run_dir import RunDir
from headwater.trainer.session import FitResult, fit
from headwater.trainer.zoo_job import fit_section, zoo_trainable

_SUBMIT = "--submit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater fit`."""
    parser.description = (
        "Train a model. If the model_dir has a checkpoint, training resumes from the last one; "
        "--autoload_last_checkpoint=false starts over. "
        "Ctrl-C finishes the step and writes a checkpoint; a second Ctrl-C stops at once. "
        "With --appliance ssh://host the run is a job of that machine, and its artifacts are copied here."
    )
    parser.usage = f"headwater fit [-h] [--compile_only | --validate_only] [--submit] {USAGE}"
    without_training.add_options(parser)
    parser.add_argument(
        _SUBMIT,
        action="store_true",
        help="put the command into the queue instead of running it; see --job_labels and --job_priority",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="profile these steps: print the time of each module, and write a trace to profile/ in model_dir",
    )
    add_following_options(parser)
    add_params_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, or submit the command to the queue; return the exit code."""
    config = with_profile(read_params(args), args.profile)
    address = args.appliance or address_of_params(config.init.backend.cluster_config.mgmt_address)
    # A job never sends itself to another machine.
    if address is not None and JOB not in os.environ:
        return fit_on_appliance(config, args, address)
    if args.submit:
        return submit(config, args.words)
    for key in ("job_labels", "job_priority"):
        if key in config.init.backend.cluster_config.model_fields_set and JOB not in os.environ:
            print(f"note: {key} has no effect without {_SUBMIT}", file=sys.stderr)
    with ranks_here(config, args.words, is_process=args.is_process) as code:
        return train(config) if code is None else code


@contextmanager
def ranks_here(config: RunConfig, words: Sequence[str], *, is_process: bool) -> Iterator[int | None]:
    """Start the input workers and train in the ranks that the params ask for, on this machine.

    Args:
        config: the run.
        words: the command line after `headwater` with which a rank trains this run.
        is_process: the command is this whole process, and not a call in a program.

    Yields:
        The exit code of the ranks; `None` if this process itself has to train, inside the context.
    """
    with nullcontext(False) if without_training.asked_for(config) else input_workers(config) as has_workers:
        # This process must continue, because it starts lost input workers again. So the launcher of the ranks
        # must not replace it.
        yield launch_ranks(config, words, in_place=is_process and not has_workers)


def launch_ranks(config: RunConfig, words: Sequence[str], *, in_place: bool) -> int | None:
    """Train in ranks if the params ask for them, and return the exit code; otherwise return `None`.

    Args:
        config: the run.
        words: the command line after `headwater` with which a rank trains this run.
        in_place: replace this process by the launcher of the ranks (`exec`); the call then does not return.
    """
    if without_training.asked_for(config):
        return None
    backend = config.init.backend
    restarts = backend.cluster_config.max_restarts
    return launch(backend.placement, words, max_restarts=restarts, in_place=in_place)


def fit_on_appliance(config: RunConfig, args: argparse.Namespace, address: Address) -> int:
    """Submit a run to an appliance and follow it; return the exit code.

    Args:
        config: the run.
        args: the arguments of the command.
        address: the appliance.
    """
    open_console(config)
    cluster = config.init.backend.cluster_config
    bundle = Bundle()
    order = RemoteSubmission(
        command=("fit", PARAMS_FILE, "--model_dir", MODEL_DIR),
        is_headwater=True,
        bundle=bundle,
        python_paths=python_folders(bundle, cluster.python_paths or ()),
        model_dir=config.init.model_dir.absolute(),
        num_csx=cluster.num_csx,
        priority=Priority(cluster.job_priority),
        labels=read_labels(cluster.job_labels),
        umask=current_umask(),
    )
    return fit_params(args, bundle_params(config, bundle), order, address)


def with_profile(config: RunConfig, steps: str | None) -> RunConfig:
    """Return the run with a profile of these steps, instead of the profiles in its params.

    Args:
        config: the run.
        steps: `FIRST:LAST`, or one step; nothing changes if not given.

    Raises:
        ConfigError: if the text is not a range of steps.
    """
    if steps is None:
        return config
    first, colon, last = steps.partition(":")
    last = last if colon else first
    if not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"expected the first and the last step, such as 5:10, got {steps!r}",
            where="--profile",
            remedy="write two step numbers with a colon between them, from 1, the smaller one first",
        )
    section = OpProfilerConfig(start_step=int(first), end_step=int(last))
    others = [entry for entry in config.init.callbacks if entry.OpProfiler is None]
    callbacks = (*others, CallbackConfig(OpProfiler=section))
    return dataclasses.replace(config, init=config.init.model_copy(update={"callbacks": callbacks}))


def submit(config: RunConfig, words: Sequence[str]) -> int:
    """Put the command into the queue, print the job's name, and return the exit code.

    Args:
        config: the run.
        words: the command line after `headwater`.
    """
    cluster = config.init.backend.cluster_config
    open_console(config)
    return submit_job(
        Submission(
            # `--submit` is left out, because the job would otherwise submit itself again.
            command=(sys.executable, "-P", "-m", "headwater", *(word for word in words if word != _SUBMIT)),
            folder=Path.cwd(),
            environment=dict(os.environ),
            num_csx=cluster.num_csx,
            model_dir=config.init.model_dir.resolve(),
            priority=Priority(cluster.job_priority),
            labels=read_labels(cluster.job_labels),
            umask=current_umask(),
        ),
        open_queue(),
    )


def train(config: RunConfig) -> int:
    """Train, print the paths of the results, and return the exit code.

    If the params ask for `compile_only` or `validate_only`, do that instead.
    """
    if without_training.asked_for(config):
        batch_size = fit_section(config).train_dataloader.batch_size
        return without_training.compile_or_validate(config, zoo_trainable(config.init), batch_size)
    console = open_console(config)
    return finish(config, fit(config, console=console), console)


def finish(config: RunConfig | UserConfig, result: FitResult, console: Console | None) -> int:
    """Print the paths of the results on rank 0, and return the exit code.

    Args:
        config: the run.
        result: result of the training.
        console: where to print; `None` to print nothing.
    """
    if current().rank != 0:
        # This is 0 even if the run was interrupted: if a rank returned an error, the launcher would end all
        # ranks.
        return 0
    if console is not None:
        for line in summary(config, result):
            console.print(line, markup=False, soft_wrap=True)
    return INTERRUPTED if result.interrupted else 0


def summary(config: RunConfig | UserConfig, result: FitResult) -> list[str]:
    """Return lines of text with the paths of the results of a finished or interrupted run."""
    run_dir = RunDir(config.init.model_dir)
    files = {
        "checkpoint": result.checkpoint,
        "loss curve": run_dir.loss_curve,
        "TensorBoard": run_dir.tensorboard,
    }
    lines = [f"{name}: {path}" for name, path in files.items() if path is not None and path.exists()]
    if result.interrupted:
        again = "the same command"
        if isinstance(config, RunConfig) and current().size == 1:  # several ranks may have another launcher
            again = shlex.join(["headwater", "fit", str(config.init.model_dir)])
        return [f"stopped after step {result.step}", *lines, f"to continue, run: {again}"]
    return [f"done: step {result.step}", *lines]
