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

from headwater.cli import without_training
from headwater.cli.arguments import USAGE, add_params_arguments, read_params
from headwater.cli.parser import Parser
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.core.units import GIB, format_bytes, parse_bytes
from headwater.fabric.launch.kuberay import PARAMS, Pods, manifest
from headwater.trainer.run_dir import resolved_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater ray`."""
    parser.description = "Train on a Ray cluster, or write a manifest for one on Kubernetes."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    fit = commands.add_parser("fit", help="train with each rank as an actor of a Ray cluster")
    fit.set_defaults(parser=fit, action=run_fit)
    _add_fit_arguments(fit)
    kubernetes = commands.add_parser(
        "manifest", help="print a RayJob manifest for KubeRay, which creates a cluster and trains"
    )
    kubernetes.set_defaults(parser=kubernetes, action=run_manifest)
    _add_manifest_arguments(kubernetes)


def _add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"headwater ray fit [-h] {USAGE}"
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS") or "auto",
        metavar="HOST:PORT",
        help="address of the cluster; this machine must be one of its nodes (RAY_ADDRESS, or else the local "
        "cluster)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=30,
        metavar="SECONDS",
        help="longest wait for resources that other jobs use (%(default)s)",
    )
    _add_rank_arguments(parser, "ranks on each node (as few nodes as possible)", required=False)
    add_params_arguments(parser)


def _add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "headwater ray manifest [-h] --image IMAGE --memory SIZE --volume CLAIM=PATH "
        f"--ranks_per_node N {USAGE}"
    )
    parser.add_argument("--image", required=True, help="container image with headwater[ray] and ray[default]")
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="memory of each worker pod, such as 64GiB"
    )
    parser.add_argument(
        "--volume",
        required=True,
        action="append",
        metavar="CLAIM=PATH",
        help="a persistent volume claim, and its mount path in all pods; repeat for several volumes",
    )
    parser.add_argument("--name", default="headwater", help="name of the job (%(default)s)")
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="restarts after a failure (%(default)s)"
    )
    _add_rank_arguments(parser, "ranks on each node", required=True)
    add_params_arguments(parser)


def _add_rank_arguments(parser: argparse.ArgumentParser, nodes_help: str, *, required: bool) -> None:
    """Add the resources of a rank, and the number of ranks on a node, which may be required."""
    parser.add_argument(
        "--cpus_per_rank", type=int, default=1, metavar="N", help="CPU cores of each rank (%(default)s)"
    )
    parser.add_argument(
        "--gpus_per_rank", type=int, default=0, choices=(0, 1), help="GPUs of each rank (%(default)s)"
    )
    parser.add_argument("--ranks_per_node", type=int, required=required, metavar="N", help=nodes_help)


def run(args: argparse.Namespace) -> int:
    """Check the arguments, run the chosen command, and return the exit code."""
    config = read_params(args)
    if without_training.asked_for(config):
        raise ConfigError(
            "compile_only and validate_only cannot run on a Ray cluster",
            remedy="use them with `headwater fit`, or remove them",
        )
    for name, least in {"cpus_per_rank": 1, "ranks_per_node": 1, "wait": 0, "retries": 0}.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(
                f"expected a finite --{name} >= {least}, got {value:g}",
                where="command line",
                remedy=f"write {least} or more",
            )
    num_ranks = config.init.backend.placement.size
    if args.ranks_per_node is not None and num_ranks % args.ranks_per_node:
        raise ConfigError(
            f"{num_ranks} ranks cannot be divided equally into nodes of {args.ranks_per_node}",
            where="--ranks_per_node",
            remedy=f"write a divisor of {num_ranks}, the sum of num_csx and num_memx",
        )
    return int(args.action(args, config))


def run_fit(args: argparse.Namespace, config: RunConfig) -> int:
    """Train on a Ray cluster; return the exit code."""
    from headwater.fabric.launch.ray import Request, launch  # imports ray, which is optional and slow

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
    """Print a manifest; return the exit code."""
    if not args.image.strip():
        raise ConfigError(
            "expected a container image, got an empty name",
            where="--image",
            remedy="name an image that has headwater[ray] and ray[default]",
        )
    named = [_volume(word) for word in args.volume]
    volumes = dict(named)
    if len(volumes) < len(named):
        twice = next(claim for number, (claim, _) in enumerate(named) if claim in dict(named[:number]))
        raise ConfigError(
            f"expected each volume claim once, got {twice} twice",
            where="--volume",
            remedy="remove one of them",
        )
    params = resolved_params(config)
    model_dir = str(config.init.model_dir.absolute())
    outside = [path for path in {model_dir: None, **_paths(params)} if not _is_below(path, volumes)]
    if model_dir in outside:
        raise ConfigError(
            f"model_dir {model_dir} is not in a volume, so its files would be lost at the end of the pod",
            where="model_dir",
            remedy=f"write --model_dir {next(iter(volumes.values()))}/…, or mount another volume",
        )
    for path in outside:
        print(f"note: {path} is not in a volume, so the image must contain it", file=sys.stderr)
    command = [
        *("headwater", "ray", "fit", str(PARAMS)),
        *("--cpus_per_rank", str(args.cpus_per_rank), "--gpus_per_rank", str(args.gpus_per_rank)),
        *("--ranks_per_node", str(args.ranks_per_node)),
    ]
    memory_bytes = parse_bytes(args.memory)
    if memory_bytes < args.ranks_per_node * GIB:
        raise ConfigError(
            f"expected at least 1 GiB of memory per rank, got {format_bytes(memory_bytes)} for "
            f"{args.ranks_per_node} ranks",
            where="--memory",
            remedy=f"write {args.ranks_per_node}GiB or more; `headwater plan` prints what a run needs",
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
    """A YAML dumper that writes text of several lines as a block."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _volume(text: str) -> tuple[str, PurePosixPath]:
    """Parse `CLAIM=PATH` and return both parts."""
    claim, equals, path = text.partition("=")
    if (
        not equals
        or re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", claim) is None
        or not path.startswith("/")
    ):
        raise ConfigError(
            f"expected CLAIM=PATH, got {text!r}",
            where="--volume",
            remedy="write the name of a persistent volume claim and an absolute path: claim=/data",
        )
    return claim, PurePosixPath(path)


def _paths(value: Any) -> dict[str, None]:
    """Return the absolute paths in resolved params, as the keys of a dict."""
    if isinstance(value, str):
        return {value: None} if value.startswith("/") else {}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {path: None for item in items for path in _paths(item)}


def _is_below(path: str, volumes: Mapping[str, PurePosixPath]) -> bool:
    path = os.path.normpath(path)  # /data/../runs is not in /data
    return any(PurePosixPath(path).is_relative_to(folder) for folder in volumes.values())
