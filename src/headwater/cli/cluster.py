"""`headwater plan --cluster`: simulate the training of a model on a cluster."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.console import Console

from headwater.config.cluster import load_cluster, shipped_clusters
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.core.units import counted
from headwater.plan.cluster.drawing import draw_scaling, draw_timeline
from headwater.plan.cluster.report import chrome_trace, render_scaling, scaling_document
from headwater.trainer.job import Trainable
from headwater.trainer.machine_file import refuse_unwritable
from headwater.trainer.simulation import Simulation, cluster_of, simulate

SCALING_FILE, TIMELINE_FILE = "scaling.png", "timeline.png"
TRACE_FILE, NUMBERS_FILE = "trace.json", "simulation.json"


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the cluster simulator."""
    group = parser.add_argument_group(
        "cluster simulator", "simulate a training step on machines described by a file"
    )
    group.add_argument(
        "--cluster",
        metavar="FILE",
        help=f"the machines: a cluster file, or one of: {', '.join(shipped_clusters())}",
    )
    group.add_argument(
        "--counts",
        metavar="N,N,…",
        help="numbers of CSXs (compute ranks) to simulate (powers of two up to the cluster's size, or 1024)",
    )
    group.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        help="strong: batch_size is divided among all CSXs (default); weak: each CSX has batch_size",
    )
    group.add_argument(
        "--write_cluster", type=Path, metavar="FILE", help="write a cluster file of this machine, to edit"
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="write plots, a trace and all numbers there")


def check_cluster_arguments(args: argparse.Namespace) -> None:
    """Raise if options of a plan contradict each other, or name a file that would be overwritten.

    Raises:
        ConfigError: names the option or the file.
    """
    if args.write_cluster is not None:
        refuse_unwritable(args.write_cluster)  # now, because the plan may take minutes
    for name in ("counts", "scaling", "out"):
        if args.cluster is None and getattr(args, name) is not None:
            raise ConfigError(f"--{name} needs --cluster", where="command line", remedy="add --cluster FILE")
    for name in ("png", "recalibrate", "write_cluster"):
        if args.cluster is not None and getattr(args, name):
            raise ConfigError(
                f"--{name} applies to this machine and cannot be used with --cluster",
                where="command line",
                remedy=f"remove --{name} or --cluster",
            )
    if args.cluster is not None and any(flag.startswith("num_csx=") for flag in args.overrides):
        raise ConfigError(
            "--num_csx cannot be used with --cluster, which simulates several numbers of CSXs",
            where="command line",
            remedy="write --counts instead",
        )


def run_cluster(args: argparse.Namespace, config: RunConfig, trainable: Trainable, batch_size: int) -> int:
    """Print the simulated time of a step on a cluster; return the exit code.

    Args:
        args: the command-line arguments.
        config: the run.
        trainable: the model with its loss, batch and optimizer.
        batch_size: samples of a batch.
    """
    cluster = cluster_of(load_cluster(args.cluster), Path(args.cluster).stem)
    simulation = simulate(
        config.init,
        trainable,
        batch_size,
        cluster,
        counts=_counts(args.counts),
        scaling=args.scaling or "strong",
    )
    console = Console()
    console.print(render_scaling(simulation.points, cluster, simulation.scaling))
    for number, why in simulation.refused.items():
        console.print(f"{counted(number, 'CSX', 'CSXs')}: {why}", highlight=False)
    if args.out is not None:
        _write(simulation, args.params, args.out)
        console.print(f"plots, trace and numbers: {args.out}", highlight=False)
    return 0


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ConfigError(
            f"expected numbers separated by commas, got {text!r}",
            where="--counts",
            remedy="write for example 1,4,16",
        )
    return sorted({int(number) for number in text.split(",")})


def _write(simulation: Simulation, params: str, folder: Path) -> None:
    points, cluster = simulation.points, simulation.cluster
    title = f"{params.removesuffix('.yaml')} on {cluster.name}"
    largest = points[-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_scaling(points, title, simulation.scaling, folder / SCALING_FILE)
        draw_timeline(largest, title, folder / TIMELINE_FILE)
        (folder / TRACE_FILE).write_text(json.dumps(chrome_trace(largest)))
        numbers = scaling_document(points, simulation.refused, cluster, simulation.scaling)
        (folder / NUMBERS_FILE).write_text(json.dumps({"params": params, **numbers}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the simulation cannot be written: {error.strerror}",
            where=str(error.filename or folder),
            remedy="name a folder to which you can write",
        ) from error
