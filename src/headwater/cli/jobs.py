"""`headwater jobs`: the queue."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from headwater.appliance.folder import find_folder
from headwater.appliance.open import BACKENDS, open_queue, prepare
from headwater.appliance.queue import Queue, new_token
from headwater.appliance.supervisor import supervise
from headwater.appliance.types import (
    Job,
    Phase,
    Submission,
    read_label_changes,
    read_labels,
    read_priority,
)
from headwater.cli.job_output import FORMATS, record, show_jobs, show_records
from headwater.cli.parser import Parser
from headwater.core.errors import ConfigError

NAME_HELP = "name of a job, its number, or a beginning of its name that no other job has"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater jobs`."""
    parser.description = "Queue jobs for the CSXs of this machine or cluster; list, label and cancel them."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def add(
        name: str, action: Callable[[argparse.Namespace], int], help_text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
        command.set_defaults(parser=command, action=action)
        add_queue_options(command)
        return command

    submit = add("submit", run_submit, "queue a command")
    submit.usage = "headwater jobs submit [--option VALUE ...] -- COMMAND ..."
    submit.set_defaults(command=())
    submit.add_argument("--num_csx", type=int, default=1, metavar="N", help="CSXs it takes (%(default)s)")
    submit.add_argument(
        "--model_dir", type=Path, metavar="DIR", help="where it works and its log goes; one job at a time"
    )
    submit.add_argument("--job_labels", nargs="+", default=[], metavar="NAME=VALUE", help="to find it by")
    submit.add_argument("--job_priority", default="p2", metavar="p1|p2|p3", help="p1 is first (%(default)s)")

    listing = add("list", run_list, "show the jobs that are not over")
    add_list_options(listing)
    show = add("show", run_show, "show all there is to know of a job")
    show.add_argument("name", metavar="JOB", help=NAME_HELP)
    show.add_argument("-o", "--output", choices=FORMATS[1:], default="yaml", help="format (%(default)s)")
    logs = add("logs", run_logs, "show what a job has printed")
    logs.add_argument("name", metavar="JOB", help=NAME_HELP)
    logs.add_argument("-f", "--follow", action="store_true", help="and what it prints until it is over")
    cancel = add("cancel", run_cancel, "ask a job to end; the second time, end it at once")
    cancel.add_argument("name", metavar="JOB", help=NAME_HELP)
    label = add("label", run_label, "set labels of a job")
    add_label_arguments(label)
    priority = add("priority", run_priority, "set the priority of a job that waits")
    add_priority_arguments(priority)
    wait = add("wait", run_wait, "wait until a job is over; fails if the job has not succeeded")
    wait.add_argument("name", metavar="JOB", help=NAME_HELP)
    wait.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so long")
    live = add("top", run_top, "show CSXs, queue, losses and rates, as they change")
    live.add_argument("--once", action="store_true", help="show them once")

    server = add("serve", run_serve, "give out the CSXs of this machine, in the foreground")
    server.add_argument(
        "--num_csx", type=int, metavar="N", help="CSXs of this machine; each GPU, or else each core, is one"
    )
    server.add_argument(
        "--grace", type=float, metavar="SECONDS", help="from the request to end a job to its end (120)"
    )
    server.add_argument(
        "--all_users",
        action="store_true",
        help="let other users submit; each job runs as its user (root only)",
    )


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which queue is meant."""
    parser.add_argument("--queue", metavar="|".join(BACKENDS), help="kind of queue (or HEADWATER_QUEUE)")
    parser.add_argument(
        "--queue_dir", type=Path, metavar="DIR", help="folder of the queue (or HEADWATER_QUEUE_DIR)"
    )


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a list of jobs."""
    parser.add_argument("-a", "--all", action="store_true", help="also jobs that are over")
    parser.add_argument("-o", "--output", choices=FORMATS, default="table", help="format (%(default)s)")


def add_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a change of labels."""
    parser.add_argument("name", metavar="JOB", help=NAME_HELP)
    parser.add_argument("labels", nargs="+", metavar="NAME=VALUE", help="set it; NAME- removes it")


def add_priority_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a change of priority."""
    parser.add_argument("name", metavar="JOB", help=NAME_HELP)
    parser.add_argument("priority", metavar="p1|p2|p3", help="p1 is first")


def run(args: argparse.Namespace) -> int:
    """Does what is asked for; returns the exit code."""
    return int(args.action(args))


def chosen_queue(args: argparse.Namespace) -> Queue:
    """The queue that the arguments mean."""
    return open_queue(args.queue, args.queue_dir)


def run_submit(args: argparse.Namespace) -> int:
    """Queues a command; returns the exit code."""
    if not args.command:
        raise ConfigError(
            "there is nothing to run",
            where="command line",
            remedy="write the command behind two dashes: headwater jobs submit -- python train.py",
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
    return submit_job(submission, chosen_queue(args))


def submit_job(submission: Submission, queue: Queue) -> int:
    """Puts a job into the queue and says its name; returns the exit code."""
    job = queue.submit(submission, new_token())
    print(job.name)
    print(f"log: {job.log}", file=sys.stderr)
    return 0


def current_umask() -> int:
    """The umask of this process."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def run_list(args: argparse.Namespace) -> int:
    """Shows jobs; returns the exit code."""
    jobs = chosen_queue(args).jobs(everything=args.all)
    print(show_jobs(jobs, args.output, reasons=args.all))
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Shows one job in a format of the list, or the list; returns the exit code."""
    if args.name is None:
        return run_list(args)
    job = chosen_queue(args).show(args.name)
    if args.output == "table":
        print(show_jobs([job], args.output, reasons=True))
    else:
        print(show_records(record(job), args.output))
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Shows a job; returns the exit code."""
    print(show_records(record(chosen_queue(args).show(args.name)), args.output))
    return 0


def run_logs(args: argparse.Namespace) -> int:
    """Shows what a job has printed; returns the exit code."""
    for text in chosen_queue(args).logs(args.name, follow=args.follow):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Asks a job to end; returns the exit code."""
    job = chosen_queue(args).cancel(args.name)
    print(f"{job.name} {_said(job)}")
    return 0


def run_label(args: argparse.Namespace) -> int:
    """Changes labels; returns the exit code."""
    job = chosen_queue(args).label(args.name, read_label_changes(args.labels))
    print(
        f"{job.name} has {', '.join(f'{name}={value}' for name, value in job.labels.items()) or 'no labels'}"
    )
    return 0


def run_priority(args: argparse.Namespace) -> int:
    """Changes a priority; returns the exit code."""
    job = chosen_queue(args).set_priority(args.name, read_priority(args.priority))
    print(f"{job.name} has priority {job.priority}")
    return 0


def run_wait(args: argparse.Namespace) -> int:
    """Waits for a job; returns 0 if it has succeeded."""
    job = chosen_queue(args).wait(args.name, args.timeout)
    print(f"{job.name} {_said(job)}")
    return 0 if job.phase == Phase.SUCCEEDED else 1


def run_top(args: argparse.Namespace) -> int:
    """Shows what happens; returns the exit code."""
    from headwater.cli import top  # imports torch, for which nobody who lists jobs should wait

    return top.show(chosen_queue(args), once=args.once)


def run_serve(args: argparse.Namespace) -> int:
    """Gives out CSXs until it is stopped; returns the exit code."""
    for name in ("num_csx", "grace"):
        value = getattr(args, name)
        if value is not None and value < (1 if name == "num_csx" else 0):
            raise ConfigError(f"--{name} is {value:g}", where="command line", remedy="write a larger number")
    if args.all_users and os.geteuid() != 0:
        raise ConfigError(
            "only root can run the jobs of other users",
            where="--all_users",
            remedy="start it as root, or leave the option out for a queue of your own",
        )
    folder = find_folder(args.queue_dir, shared=args.all_users)
    prepare(folder, num_csx=args.num_csx, grace_s=args.grace, shared=args.all_users)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    print(f"giving out the CSXs of this machine; the queue is {folder.path}", flush=True)
    supervise(folder)
    print("stopped; jobs that run go on, and jobs that wait go on waiting")
    return 0


def _said(job: Job) -> str:
    if not job.phase.over:
        return f"is {job.phase} and was asked to end"
    return f"is {job.phase}" + (f": {job.reason}" if job.reason else "")
