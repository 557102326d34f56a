"""`headwater ray`: train on a Ray cluster, or write a manifest for one on Kubernetes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from headwater.cli import early
from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.cli.parser import Parser
from headwater.config import RunConfig
from headwater.core.errors import ConfigError
from headwater.core.units import GIB, format_bytes, parse_bytes
from headwater.fabric.kuberay import PARAMS, Pods, manifest
from headwater.trainer.run_dir import resolved_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater ray`."""
    parser.description = "Train on a Ray cluster."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    fit = commands.add_parser("fit", help="train, each rank an actor of a Ray cluster")
    fit.set_defaults(parser=fit, action=run_fit)
    fit.usage = f"headwater ray fit [-h] {USAGE}"
    fit.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS") or "auto",
        metavar="HOST:PORT",
        help="of the cluster, to which this machine belongs (RAY_ADDRESS, or else the one that runs here)",
    )
    fit.add_argument(
        "--wait",
        type=float,
        default=30,
        metavar="SECONDS",
        help="for what others have now (%(default)s)",
    )

    kubernetes = commands.add_parser(
        "manifest", help="write a RayJob for KubeRay, which makes a cluster and trains"
    )
    kubernetes.set_defaults(parser=kubernetes, action=run_manifest)
    kubernetes.usage = (
        "headwater ray manifest [-h] --image IMAGE --memory SIZE --volume CLAIM=PATH "
        f"--ranks_per_node N {USAGE}"
    )
    kubernetes.add_argument(
        "--image", required=True, help="of containers, with headwater[ray] and ray[default]"
    )
    kubernetes.add_argument(
        "--memory", required=True, metavar="SIZE", help="of each pod that computes: 64GiB"
    )
    kubernetes.add_argument(
        "--volume",
        required=True,
        action="append",
        metavar="CLAIM=PATH",
        help="a persistent volume claim, and where all pods have it; more than once for more",
    )
    kubernetes.add_argument("--name", default="headwater", help="of the job (%(default)s)")
    kubernetes.add_argument(
        "--retries", type=int, default=2, metavar="N", help="goes on so often after a failure (%(default)s)"
    )

    for command in (fit, kubernetes):
        command.add_argument(
            "--cpus_per_rank", type=int, default=1, metavar="N", help="of each rank (%(default)s)"
        )
        command.add_argument(
            "--gpus_per_rank", type=int, default=0, choices=(0, 1), help="of each rank (%(default)s)"
        )
        command.add_argument(
            "--ranks_per_node",
            type=int,
            required=command is kubernetes,
            metavar="N",
            help="on each node" if command is kubernetes else "on each node (on as few nodes as will do)",
        )
        add_params_arguments(command)


def run(args: argparse.Namespace) -> int:
    """Does what is asked for; returns the exit code."""
    config = read_params(args)
    if early.asked_for(config):
        raise ConfigError(
            "compile_only and validate_only need no ranks",
            remedy="say them to `headwater fit`, or leave them out",
        )
    for name, least in {"cpus_per_rank": 1, "ranks_per_node": 1, "wait": 0, "retries": 0}.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(f"--{name} is {value:g}", where="command line", remedy=f"write {least} or more")
    num_ranks = config.init.backend.placement.size
    if args.ranks_per_node is not None and num_ranks % args.ranks_per_node:
        raise ConfigError(
            f"{num_ranks} ranks cannot be divided into {args.ranks_per_node} for each node",
            where="--ranks_per_node",
            remedy="write a divisor of num_csx and num_memx together",
        )
    return int(args.action(args, config))


def run_fit(args: argparse.Namespace, config: RunConfig) -> int:
    """Trains; returns the exit code."""
    from headwater.fabric.ray import Request, launch  # an extra, and it takes a while

    request = Request(
        num_ranks=config.init.backend.placement.size,
        cpus_per_rank=args.cpus_per_rank,
        gpus_per_rank=args.gpus_per_rank,
        ranks_per_node=args.ranks_per_node,
        address=args.address,
        wait_s=args.wait,
    )
    return launch(request, ["fit", args.params, *args.overrides])


def run_manifest(args: argparse.Namespace, config: RunConfig) -> int:
    """Writes a manifest; returns the exit code."""
    volumes = dict(map(_volume, args.volume))
    if len(volumes) < len(args.volume):
        raise ConfigError("a claim is mounted twice", where="--volume", remedy="name each claim once")
    params = resolved_params(config)
    model_dir = str(config.init.model_dir.absolute())
    outside = [path for path in {model_dir: None, **_paths(params)} if not _is_below(path, volumes)]
    if model_dir in outside:
        raise ConfigError(
            f"model_dir {model_dir} is in no volume: what is written there would end with its pod",
            where="model_dir",
            remedy=f"write --model_dir {next(iter(volumes.values()))}/…, or mount another volume",
        )
    for path in outside:
        print(f"note: {path} is in no volume, so the image must have it", file=sys.stderr)
    command = [
        *("headwater", "ray", "fit", str(PARAMS)),
        *("--cpus_per_rank", str(args.cpus_per_rank), "--gpus_per_rank", str(args.gpus_per_rank)),
        *("--ranks_per_node", str(args.ranks_per_node)),
    ]
    memory_bytes = parse_bytes(args.memory)
    if memory_bytes < args.ranks_per_node * GIB:
        raise ConfigError(
            f"{format_bytes(memory_bytes)} of memory are too few for {args.ranks_per_node} ranks",
            where="--memory",
            remedy=f"write {args.ranks_per_node}GiB or more; `headwater plan` says what a run takes",
        )
    pods = Pods(
        count=config.init.backend.placement.size // args.ranks_per_node,
        cpus=args.cpus_per_rank * args.ranks_per_node,
        gpus=args.gpus_per_rank * args.ranks_per_node,
        memory_bytes=memory_bytes,
        image=args.image,
        volumes=volumes,
    )
    text = yaml.safe_dump(params, sort_keys=False)
    documents = manifest(args.name, pods, command, text, num_retries=args.retries)
    print(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False), end="")
    return 0


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _volume(text: str) -> tuple[str, PurePosixPath]:
    """The name of a claim, and the path of a volume in pods."""
    claim, equals, path = text.partition("=")
    if (
        not equals
        or re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", claim) is None
        or not path.startswith("/")
    ):
        raise ConfigError(
            f"{text!r} names no volume",
            where="--volume",
            remedy="write the name of a persistent volume claim and an absolute path: claim=/data",
        )
    return claim, PurePosixPath(path)


def _paths(value: Any) -> dict[str, None]:
    """The absolute paths in params as resolved."""
    if isinstance(value, str):
        return {value: None} if value.startswith("/") else {}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {path: None for item in items for path in _paths(item)}


def _is_below(path: str, volumes: Mapping[str, PurePosixPath]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in volumes.values())
