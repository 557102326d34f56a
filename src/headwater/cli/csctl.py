"""`csctl`: the queue under the command names of Cerebras' clusters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from headwater.appliance.remote.address import Address
from headwater.cli import jobs
from headwater.cli.appliance_option import take_address
from headwater.cli.main import escape_unprintable, guarded
from headwater.cli.parser import Parser, suggestion
from headwater.core.errors import ConfigError

_RESOURCES = {"jobs": "jobs", "job": "jobs"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code, as `headwater.cli.main.main` does."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        escape_unprintable()
    return guarded(lambda: _run(*take_address(words)))


def _run(address: Address | None, words: list[str]) -> int:
    parser = Parser(prog="csctl", description="List, label and cancel the jobs of the queue.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('headwater')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    get = _add(commands, "get", jobs.run_get, "show jobs: csctl get jobs, csctl get job JOB -o yaml")
    get.add_argument("resource", metavar="RESOURCE", help="jobs, or job")
    get.add_argument("name", nargs="?", metavar="JOB", help=jobs.NAME_HELP)
    jobs.add_list_options(get)
    cancel = _add(commands, "cancel", jobs.run_cancel, "ask a job to end: csctl cancel job JOB")
    cancel.add_argument("resource", metavar="RESOURCE", help="job")
    cancel.add_argument("name", metavar="JOB", help=jobs.NAME_HELP)
    label = _add(commands, "label", jobs.run_label, "set labels: csctl label job JOB NAME=VALUE")
    label.add_argument("resource", metavar="RESOURCE", help="job")
    jobs.add_label_arguments(label)
    job = commands.add_parser("job", help="change the priority of a job: csctl job set-priority JOB p1|p2|p3")
    actions = job.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    priority = _add(actions, "set-priority", jobs.run_priority, "set the priority of a waiting job")
    jobs.add_priority_arguments(priority)

    args = parser.parse_args(words)
    args.appliance = address
    if "resource" in args and args.resource not in _RESOURCES:
        listed = f"available: {', '.join(dict.fromkeys(_RESOURCES.values()))}"
        raise ConfigError(
            f"unknown resource {args.resource!r}",
            where="command line",
            remedy=suggestion(args.resource, _RESOURCES, listed),
        )
    return int(args.action(args))


def _add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    action: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text)
    parser.set_defaults(action=action)
    jobs.add_queue_options(parser)
    return parser
