"""`headwater jobs`: submit, list and cancel the jobs of the queue."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headwater.appliance.folder import ENVIRONMENT as QUEUE_DIR
from headwater.appliance.folder import find_folder
from headwater.appliance.open import BACKENDS, open_queue, prepare
from headwater.appliance.open import ENVIRONMENT as QUEUE
from headwater.appliance.queue import Queue, new_token
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.queue import RemoteQueue
from headwater.appliance.supervisor import supervise
from headwater.appliance.types import (
    Job,
    Phase,
    Submission,
    read_label_changes,
    read_labels,
    read_priority,
)
from headwater.cli import remote_jobs
from headwater.cli.appliance_option import HELP, say
from headwater.cli.following import add_following_options
from headwater.cli.job_output import FORMATS, last_error, record, show_jobs, show_records
from headwater.cli.parser import Parser
from headwater.core.errors import ConfigError, QueueError

_END_OF_LOG_BYTES = 1 << 14

NAME_HELP = "name of a job, its number, or a unique prefix of its name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater jobs`."""
    parser.description = "Submit jobs to the CSXs of this machine or cluster; list, label and cancel them."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def add(
        name: str, action: Callable[[argparse.Namespace], int], help_text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
        command.set_defaults(parser=command, action=action)
        add_queue_options(command)
        return command

    _add_submit_arguments(add("submit", run_submit, "put a command into the queue"))
    attach = add("attach", remote_jobs.run_attach, "follow a job on an appliance, and copy its artifacts")
    attach.add_argument("name", metavar="JOB", help=NAME_HELP)
    attach.add_argument(
        "--model_dir", type=Path, metavar="DIR", help="folder for the artifacts (as given at the submission)"
    )
    add_following_options(attach)
    add_list_options(add("list", run_list, "list the unfinished jobs"))
    show = add("show", run_show, "show all details of a job, and the last error of a failed job")
    show.add_argument("name", metavar="JOB", help=NAME_HELP)
    show.add_argument("-o", "--output", choices=FORMATS[1:], default="yaml", help="format (%(default)s)")
    logs = add("logs", run_logs, "show the output of a job")
    logs.add_argument("name", metavar="JOB", help=NAME_HELP)
    logs.add_argument(
        "-f", "--follow", action="store_true", help="wait for further output until the job ends"
    )
    cancel = add("cancel", run_cancel, "ask a job to end; kill it if it was asked before")
    cancel.add_argument("name", metavar="JOB", help=NAME_HELP)
    add_label_arguments(add("label", run_label, "set labels of a job"))
    add_priority_arguments(add("priority", run_priority, "set the priority of a waiting job"))
    wait = add("wait", run_wait, "wait until a job has ended; exit code 1 if it has not succeeded")
    wait.add_argument("name", metavar="JOB", help=NAME_HELP)
    wait.add_argument("--timeout", type=float, metavar="SECONDS", help="stop waiting after this time")
    live = add("top", run_top, "show CSXs, queue, losses and rates, and update them")
    live.add_argument("--once", action="store_true", help="print them once instead of updating them")
    _add_serve_arguments(add("serve", run_serve, "run the queue's supervisor in the foreground"))
    add("stdio", run_stdio, "answer requests of --appliance on stdin and stdout; ssh starts this command")


def _add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headwater jobs submit [--option VALUE ...] -- COMMAND ..."
    # `main` looks for this name, and puts the words after `--` there.
    parser.set_defaults(command=())
    parser.add_argument(
        "--num_csx",
        type=int,
        default=1,
        metavar="N",
        help="CSXs of the job: GPUs, or cores of a machine without GPUs (%(default)s)",
    )
    parser.add_argument(
        "--model_dir",
        type=Path,
        metavar="DIR",
        help="folder of the job and its log; only one unfinished job may use it",
    )
    parser.add_argument(
        "--job_labels", nargs="+", default=[], metavar="NAME=VALUE", help="labels to find the job by"
    )
    parser.add_argument(
        "--job_priority", default="p2", metavar="p1|p2|p3", help="p1 is the highest (%(default)s)"
    )
    parser.add_argument(
        "--upload",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="with --appliance: further files and folders to send, besides those that the command names",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="with --appliance: print the log and copy artifacts until the end",
    )
    add_following_options(parser)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num_csx", type=int, metavar="N", help="CSXs of this machine (one per GPU, or else one per core)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="time from asking a job to end until it is killed (120)",
    )
    parser.add_argument(
        "--all_users",
        action="store_true",
        help="accept jobs of all users; each runs as the user that submitted it (root only)",
    )


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the queue."""
    # Only for the help: `take_address` has removed the option.
    parser.add_argument("--appliance", metavar="ADDRESS", help=HELP, default=argparse.SUPPRESS)
    parser.add_argument("--queue", metavar="|".join(BACKENDS), help="kind of queue (or HEADWATER_QUEUE)")
    parser.add_argument(
        "--queue_dir", type=Path, metavar="DIR", help="folder of the queue (or HEADWATER_QUEUE_DIR)"
    )


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a list of jobs."""
    parser.add_argument("-a", "--all", action="store_true", help="also list jobs that have ended")
    parser.add_argument("-o", "--output", choices=FORMATS, default="table", help="format (%(default)s)")


def add_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a change of labels."""
    parser.add_argument("name", metavar="JOB", help=NAME_HELP)
    parser.add_argument("labels", nargs="+", metavar="NAME=VALUE", help="label to set; NAME- removes one")


def add_priority_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a change of priority."""
    parser.add_argument("name", metavar="JOB", help=NAME_HELP)
    parser.add_argument("priority", metavar="p1|p2|p3", help="p1 is the highest")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    return int(args.action(args))


@contextmanager
def chosen_queue(args: argparse.Namespace) -> Iterator[Queue]:
    """Yield the queue that the arguments select.

    Raises:
        ConfigError: if they select a queue of this machine and one of an appliance.
    """
    if args.appliance is None:
        yield open_queue(args.queue, args.queue_dir)
        return
    _refuse_local_options(args)
    with closing(Connection(args.appliance, say)) as connection:
        yield RemoteQueue(connection)


def _refuse_local_options(args: argparse.Namespace) -> None:
    for name, given, variable in (
        ("queue", args.queue, QUEUE),
        ("queue_dir", args.queue_dir, QUEUE_DIR),
    ):
        if given is not None:
            raise ConfigError(
                f"--{name} selects a queue of this machine, and --appliance one of another machine",
                where="command line",
                remedy=f"set {variable} on the appliance, for example with SetEnv in its sshd_config",
            )


def run_submit(args: argparse.Namespace) -> int:
    """Put a command into the queue; return the exit code."""
    if not args.command:
        raise ConfigError(
            "the command of the job is missing",
            where="command line",
            remedy="write it after two dashes: headwater jobs submit -- python train.py",
        )
    if args.appliance is not None:
        _refuse_local_options(args)
        return remote_jobs.submit_command(args, current_umask())
    if args.upload or args.follow:
        raise ConfigError(
            "--upload and --follow need --appliance",
            where="command line",
            remedy="add --appliance ssh://HOST, or remove these options",
        )
    submission = Submission(
        command=tuple(args.command),
        folder=Path.cwd(),
        environment=dict(os.environ),
        num_csx=args.num_csx,
        model_dir=args.model_dir and args.model_dir.expanduser().resolve(),
        priority=read_priority(args.job_priority),
        labels=read_labels(args.job_labels),
        umask=current_umask(),
    )
    with chosen_queue(args) as queue:
        return submit_job(submission, queue)


def submit_job(submission: Submission, queue: Queue) -> int:
    """Put a job into the queue and print its name; return the exit code."""
    job = queue.submit(submission, new_token())
    print(job.name)
    print(f"log: {job.log}", file=sys.stderr)
    return 0


def current_umask() -> int:
    """Return the umask of this process."""
    umask = os.umask(0o077)  # the system can only read it by setting another one
    os.umask(umask)
    return umask


def run_list(args: argparse.Namespace) -> int:
    """Print a list of jobs; return the exit code."""
    with chosen_queue(args) as queue:
        jobs = queue.jobs(everything=args.all)
    print(show_jobs(jobs, args.output, reasons=args.all))
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Print one job, or the list of jobs if no name is given; return the exit code."""
    if args.name is None:
        return run_list(args)
    if args.output != "table":
        return run_show(args)
    with chosen_queue(args) as queue:
        job = queue.show(args.name)
    print(show_jobs([job], args.output, reasons=True))
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print all details of a job; return the exit code."""
    with chosen_queue(args) as queue:
        job = queue.show(args.name)
        details = record(job)
        if job.phase == Phase.FAILED and (line := _last_error(queue, job)) is not None:
            details["last_error"] = line
    print(show_records(details, args.output))
    return 0


def _last_error(queue: Queue, job: Job) -> str | None:
    try:
        return last_error(queue.read_log(job, -_END_OF_LOG_BYTES))
    except QueueError:  # for example the log of another user; the other details are shown all the same
        return None


def run_logs(args: argparse.Namespace) -> int:
    """Print the output of a job; return the exit code."""
    with chosen_queue(args) as queue:
        for text in queue.logs(args.name, follow=args.follow):
            sys.stdout.write(text)
            sys.stdout.flush()
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Ask a job to end; return the exit code."""
    with chosen_queue(args) as queue:
        job = queue.cancel(args.name)
    print(f"{job.name} {_state_text(job)}")
    return 0


def run_label(args: argparse.Namespace) -> int:
    """Change the labels of a job; return the exit code."""
    with chosen_queue(args) as queue:
        job = queue.label(args.name, read_label_changes(args.labels))
    print(
        f"{job.name} has {', '.join(f'{name}={value}' for name, value in job.labels.items()) or 'no labels'}"
    )
    return 0


def run_priority(args: argparse.Namespace) -> int:
    """Change the priority of a job; return the exit code."""
    with chosen_queue(args) as queue:
        job = queue.set_priority(args.name, read_priority(args.priority))
    print(f"{job.name} has priority {job.priority}")
    return 0


def run_wait(args: argparse.Namespace) -> int:
    """Wait for the end of a job; return 0 if it has succeeded, otherwise 1."""
    with chosen_queue(args) as queue:
        job = queue.wait(args.name, args.timeout)
    print(f"{job.name} {_state_text(job)}")
    return 0 if job.phase == Phase.SUCCEEDED else 1


def run_top(args: argparse.Namespace) -> int:
    """Print the state of the queue and its jobs continuously; return the exit code."""
    from headwater.cli import top  # imports torch, which would slow down the other commands

    with chosen_queue(args) as queue:
        return top.show(queue, once=args.once, has_histories=args.appliance is None)


def run_serve(args: argparse.Namespace) -> int:
    """Run the supervisor until it is stopped; return the exit code."""
    for name, least in (("num_csx", 1), ("grace", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:  # NaN is refused too
            raise ConfigError(
                f"expected --{name} >= {least}, got {value:g}",
                where="command line",
                remedy="write a larger number",
            )
    if args.all_users and os.geteuid() != 0:
        raise ConfigError(
            "only root can run the jobs of other users",
            where="--all_users",
            remedy="run the command as root, or remove the option to serve your own queue",
        )
    folder = find_folder(args.queue_dir, shared=args.all_users)
    prepare(folder, num_csx=args.num_csx, grace_s=args.grace, shared=args.all_users)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    print(f"serving the queue {folder.path}", flush=True)
    supervise(folder)
    print("stopped; running jobs continue, and waiting jobs stay in the queue")
    return 0


def run_stdio(args: argparse.Namespace) -> int:
    """Answer the requests of a client on another machine until it disconnects; return the exit code."""
    from headwater.appliance.remote.server import serve

    if sys.stdin.isatty():
        raise ConfigError(
            "headwater jobs stdio reads requests of another program, but stdin is a terminal",
            remedy="use the queue from the other machine: headwater --appliance ssh://host jobs list",
        )
    # The client would read anything that this process prints as a part of a reply. So prints go to stderr.
    target = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.fileno(), target)
    return 0


def _state_text(job: Job) -> str:
    if not job.phase.over:
        return f"is {job.phase} and was asked to end"
    return f"is {job.phase}" + (f": {job.reason}" if job.reason else "")
