"""`headwater conform`: compare the training of a model, or of random models, with plain PyTorch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headwater.cli.arguments import positive
from headwater.cli.files import write_text
from headwater.conform.compare import ALL_PLANS, Comparison
from headwater.conform.grammar.campaign import Folder, counts, faults, is_clean, run_campaign
from headwater.conform.grammar.case import Outcome
from headwater.conform.grammar.draw import AUTOCAST
from headwater.conform.report import Entry
from headwater.core.errors import ConfigError
from headwater.core.units import format_duration
from headwater.fabric.launch.cores import num_cores

_DIFFERENT = 1
_STEPS, _TIMEOUT_S, _RANDOM_TIMEOUT_S = 3, 600, 60
_SHOW_EVERY_S = 5.0
_OTHER_PATH = "name another path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater conform`."""
    parser.description = (
        "Train a model for some steps in plain PyTorch, and streamed under several plans. Print the first "
        "tensor that is not bit-identical, or a list of what was compared. Exit code: 0 if the results are "
        "bit-identical under every plan, 1 if not, 2 for invalid input."
    )
    parser.usage = (
        "headwater conform [-h] [--steps N] [--seed N] [--precision NAME] [--plans PLAN,…] [--timeout S] "
        "[--json FILE] [--out FILE] MODEL\n       headwater conform --random N [--seed N] "
        "[--precision NAME] [--workers N] [--timeout S] [--out FOLDER]"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="MODULE:FACTORY or FILE.py:FACTORY, a function that returns model, [batch, …] and optionally "
        "loss(model, batch) and optimizer(parameters); or a params file; or a Hugging Face folder",
    )
    parser.add_argument("--steps", type=positive, default=_STEPS, metavar="N", help=f"steps ({_STEPS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of values and batches (0)")
    parser.add_argument(
        "--precision",
        choices=tuple(AUTOCAST),
        default="fp32",
        help="bf16 and fp16: forwards and losses run under autocast (fp32)",
    )
    parser.add_argument(
        "--plans", metavar="PLAN,…", help=f"plans to compare under (all: {', '.join(ALL_PLANS)})"
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help=f"seconds for each run ({_TIMEOUT_S}; {_RANDOM_TIMEOUT_S} with --random)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file for the report; with --random a folder from which the same command resumes",
    )
    parser.add_argument(
        "--random", type=positive, metavar="N", help="compare N random models instead of MODEL"
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="random models at the same time (one per core)"
    )


def run(args: argparse.Namespace) -> int:
    """Compare, print the report, and return the exit code."""
    if args.random is not None:
        if args.model is not None:
            raise ConfigError(
                "expected a model or --random, found both", where="command line", remedy="remove one"
            )
        return _run_random(args)
    if args.model is None:
        raise ConfigError(
            "expected a model, found none",
            where="command line",
            remedy="write MODULE:FACTORY, a params file, a Hugging Face folder, or --random N",
        )
    return _run_model(args)


def _run_model(args: argparse.Namespace) -> int:
    """Compare one model, print the report, and return the exit code."""
    report = Comparison(
        args.model,
        plans=_plans(args.plans),
        steps=args.steps,
        seed=args.seed,
        precision=args.precision,
        limit_s=args.timeout or _TIMEOUT_S,
        show=_show_entry,
    ).run()
    text = report.render()
    print(text)
    if args.out is not None:
        write_text(args.out, text + "\n", remedy=_OTHER_PATH)
    if args.json is not None:
        write_text(args.json, json.dumps(report.to_json(), indent=2) + "\n", remedy=_OTHER_PATH)
    return 0 if report.passed else _DIFFERENT


def _show_entry(entry: Entry) -> None:
    """Print the outcome of one run as progress, because a run takes some seconds."""
    print(f"{entry.run}: {entry.outcome}", file=sys.stderr, flush=True)


def _plans(names: str | None) -> Sequence[str]:
    """Return the plans that the command line names; all if `names` is `None`.

    Raises:
        ConfigError: if a plan is unknown.
    """
    if names is None:
        return ALL_PLANS
    chosen = names.split(",")
    for name in chosen:
        if name not in ALL_PLANS:
            raise ConfigError(
                f"unknown plan {name!r}", where="--plans", remedy=f"write some of {', '.join(ALL_PLANS)}"
            )
    return chosen


def _run_random(args: argparse.Namespace) -> int:
    """Compare random models, print a summary, and return the exit code."""
    folder = None if args.out is None else Folder(args.out, args.seed, args.precision)
    progress = _Progress(args.random)
    outcomes = run_campaign(
        args.seed,
        args.random,
        workers=args.workers or num_cores(),
        limit_s=args.timeout or _RANDOM_TIMEOUT_S,
        precision=args.precision,
        folder=folder,
        progress=progress.show,
    )
    print(_summary(outcomes))
    return 0 if is_clean(outcomes) else _DIFFERENT


class _Progress:
    """The progress of a campaign, printed every few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = self._shown = time.monotonic()
        self._begun: int | None = None  # number of outcomes of an earlier, resumed command

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Print a line if the last one is at least `_SHOW_EVERY_S` seconds old."""
        now = time.monotonic()
        if self._begun is None:
            # The first call has one new outcome, so the divisor below is never 0.
            self._begun = len(outcomes) - 1
        if now - self._shown < _SHOW_EVERY_S:
            return
        self._shown = now
        done = len(outcomes)
        left_s = (now - self._start) / (done - self._begun) * (self._total - done)
        found = sum(bool(outcome.faults()) for outcome in outcomes)
        print(
            f"{done} of {self._total} models, {found} with faults, {format_duration(left_s)} left",
            file=sys.stderr,
            flush=True,
        )


def _summary(outcomes: Sequence[Outcome]) -> str:
    """Return the outcome of a campaign as text."""
    lines = [f"{len(outcomes)} random models, each under two plans"]
    lines += [f"{count:7} {verdict.value}" for verdict, count in counts(outcomes).items() if count]
    for fault in faults(outcomes):
        cases = ", ".join(map(str, fault.cases[:5])) + (", …" if len(fault.cases) > 5 else "")
        lines += [
            "",
            f"{fault.verdict.value}: {fault.cause} (cases {cases})",
            f"  {fault.reason}",
            "",
            fault.script,
        ]
    return "\n".join(lines)
