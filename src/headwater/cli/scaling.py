"""`headwater scaling`: a family of sizes, and the power law of its losses."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from headwater.appliance.open import open_queue
from headwater.appliance.queue import new_token
from headwater.appliance.types import Submission, read_labels, read_priority
from headwater.cli.fit import launch_ranks, train
from headwater.cli.jobs import add_queue_options, current_umask
from headwater.cli.parser import Parser
from headwater.config.files import find_params
from headwater.config.run import load_params
from headwater.core.errors import QueueError
from headwater.core.files import check_place, check_replaceable, disk_errors, replace_file
from headwater.core.units import format_count
from headwater.scaling.family import Family, Parametrization, write_family
from headwater.scaling.law import LEVEL, Estimate
from headwater.scaling.picture import describe_law, draw_report
from headwater.scaling.results import Report, has_ended, make_report, read_loss, read_results, read_table
from headwater.scaling.sizes import Size, read_family, read_sizes

REPORT, PICTURE = "scaling.json", "scaling.png"
"""Names of the files with the law, in the folder of a family."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater scaling`."""
    parser.description = (
        "Train a family of sizes, fit a power law to their losses over compute, and predict the next size."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def add(
        name: str, action: Callable[[argparse.Namespace], int], help_text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=help_text)
        command.set_defaults(parser=command, action=action)
        return command

    _add_write_arguments(add("write", run_write, "write the params files of a family"))
    show = add("show", run_show, "print the table of a family: sizes, learning rates, tokens, FLOPs")
    show.add_argument("family", nargs="+", metavar="FAMILY", help="folder of a family, or params files")
    for name, action, text in (
        ("run", run_run, "train the sizes that have not ended, one after the other, the smallest first"),
        ("submit", run_submit, "put the sizes that have not ended into the job queue"),
    ):
        command = add(name, action, text)
        command.add_argument("family", type=Path, metavar="DIR", help="folder of a family")
        if name == "submit":
            add_queue_options(command)
            command.add_argument(
                "--job_priority", default="p2", metavar="p1|p2|p3", help="p1 is the highest (%(default)s)"
            )
    fit = add("fit", run_fit, "fit the power law to the losses, and predict the largest sizes")
    fit.add_argument(
        "family", type=Path, metavar="FAMILY", help="folder of a family, or a CSV file: name,flops,loss"
    )
    fit.add_argument(
        "--predict",
        type=int,
        default=1,
        metavar="N",
        help="the N largest sizes are predicted, and the law is fitted to the others (%(default)s)",
    )
    fit.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder for {REPORT} and {PICTURE} (that of the family)"
    )


def _add_write_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="params file of a decoder, or the name of a shipped one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the family")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="hidden_size of each size, a multiple of the base's head size",
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="layers of each size, or one number for all",
    )
    parser.add_argument(
        "--tokens_per_parameter", type=float, default=20.0, metavar="X", help="length of runs (%(default)s)"
    )
    parser.add_argument(
        "--parametrization",
        choices=get_args(Parametrization),
        default="mup",
        help="how the learning rate of the base is transferred (%(default)s)",
    )
    parser.add_argument(
        "--learning_rate", type=float, metavar="X", help="highest rate for the base's own size (its file's)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    return int(args.action(args))


def run_write(args: argparse.Namespace) -> int:
    """Write the params files of a family and print its table; return the exit code."""
    family = Family(
        base=args.base,
        widths=args.widths,
        depths=args.depths,
        tokens_per_parameter=args.tokens_per_parameter,
        parametrization=args.parametrization,
        learning_rate=args.learning_rate,
    )
    _print_sizes(read_sizes(write_family(family, args.out)))
    print(f"wrote {args.out}; to train the sizes, run: headwater scaling run {args.out}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print the table of a family; return the exit code."""
    sizes: list[Size] = []
    for word in args.family:
        folder = Path(word)
        sizes += read_family(folder) if folder.is_dir() else read_sizes([find_params(word)])
    _print_sizes(sorted(sizes, key=lambda size: size.flops))
    return 0


def run_run(args: argparse.Namespace) -> int:
    """Train the sizes that have not ended; return the exit code."""
    for size in read_family(args.family):
        if has_ended(size):
            continue
        print(f"{size.name}: {format_count(size.parameters)} parameters, {size.steps} steps", flush=True)
        config = load_params(size.params)
        exit_code = launch_ranks(config, ("fit", str(size.params)), in_place=False)
        if exit_code is None:
            exit_code = train(config)
        if exit_code:
            return exit_code
        read_loss(size)  # raises an error if this run was not evaluated
    print(f"all sizes have ended; to fit the law, run: headwater scaling fit {args.family}")
    return 0


def run_submit(args: argparse.Namespace) -> int:
    """Put the sizes that have not ended into the queue and print the jobs' names; return the exit code.

    The exit code is 1 if the queue has refused all sizes.
    """
    submitted, refused = 0, 0
    queue = open_queue(args.queue, args.queue_dir)
    for size in read_family(args.family):
        if has_ended(size):
            continue
        submission = Submission(
            # For `-P` see [Note: planted modules].
            command=(sys.executable, "-P", "-m", "headwater", "fit", str(size.params.absolute())),
            folder=Path.cwd(),
            environment=dict(os.environ),
            num_csx=load_params(size.params).init.backend.cluster_config.num_csx,
            model_dir=size.model_dir.absolute(),
            priority=read_priority(args.job_priority),
            labels=read_labels([f"size={size.name}"]),
            umask=current_umask(),
        )
        try:
            print(f"{queue.submit(submission, new_token()).name} {size.name}")
            submitted += 1
        except QueueError as error:
            # The queue refuses a size whose model_dir is in use by an earlier job. Other sizes can be queued.
            print(f"not submitted: {size.name}: {error.what}", file=sys.stderr)
            refused += 1
    return 1 if refused and not submitted else 0


def run_fit(args: argparse.Namespace) -> int:
    """Fit the law, print it with its predictions, write both; return the exit code."""
    is_folder = args.family.is_dir()
    out: Path = args.out or (args.family if is_folder else args.family.parent)
    results = read_results(read_family(args.family)) if is_folder else read_table(args.family)
    check_place(out, expected="a folder")
    report = make_report(results, args.predict)
    _print_report(report)
    for name in (REPORT, PICTURE):
        check_replaceable(out / name)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    replace_file(out / REPORT, json.dumps(report.to_record(), indent=1).encode())
    print(f"wrote {out / REPORT}")
    draw_report(report, out / PICTURE)  # an error if matplotlib is not installed
    print(f"wrote {out / PICTURE}")
    return 0


_COLUMNS = (
    *("size", "parameters", "layers", "width", "heads", "filter"),
    *("rate", "batch", "steps", "tokens", "FLOPs"),
)


def _print_sizes(sizes: Sequence[Size]) -> None:
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "size" else "right")
    for size in sizes:
        model = size.model
        table.add_row(
            size.name,
            format_count(size.parameters),
            *map(str, (model.num_hidden_layers, model.hidden_size, model.num_heads, model.ffn_size)),
            f"{size.learning_rate:.3g}",
            str(size.batch_size),
            str(size.steps),
            f"{size.tokens:.3g}",
            f"{size.flops:.3g}",
        )
    Console(width=120).print(table)


def _print_report(report: Report) -> None:
    table = Table()
    for column in ("size", "FLOPs", "loss", "law", f"{LEVEL:.0%} interval", "law − loss"):
        table.add_column(column, justify="left" if column == "size" else "right")
    for run in report.fit.runs:
        value = report.fit.law.loss(run.compute)
        table.add_row(
            run.name,
            f"{run.compute:.3g}",
            f"{run.loss:.4f}",
            f"{value:.4f}",
            "fitted",
            f"{value / run.loss - 1:+.2%}",
        )
    for each in report.predictions:
        error = "not trained" if each.error is None else f"{each.error:+.2%}"
        loss = "–" if each.loss is None else f"{each.loss:.4f}"
        expected = each.predicted
        table.add_row(
            each.name, f"{each.compute:.3g}", loss, f"{expected.value:.4f}", _interval(expected), error
        )
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(describe_law(report), markup=False)
    for name, estimate in (("exponent", report.fit.exponent), ("irreducible loss", report.fit.irreducible)):
        console.print(f"{name}: {estimate.value:.4f}, {LEVEL:.0%} interval {_interval(estimate)}")


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.4f} to {estimate.high:.4f}"
