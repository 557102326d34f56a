"""Runs on several compute ranks: started on one machine, and what they cannot do."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headwater.config.run import SetupConfig
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.host import HostFabric
from headwater.plan.types import Plan
from headwater.trainer.job import Trainable

_KEY = "trainer.init.backend.cluster_config.num_csx"


def is_rank() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch(num_csx: int, arguments: Sequence[str]) -> int:
    """Run a command of this program as several ranks on this machine; returns its exit code.

    Args:
        num_csx: how many.
        arguments: of the command line.

    Raises:
        ConfigError: if there are not so many cores.
    """
    cores = len(os.sched_getaffinity(0))
    if num_csx > cores:
        raise ConfigError(
            f"{num_csx} CSXs are asked for, and there are {cores} cores",
            where=_KEY,
            remedy=f"write at most {cores}",
        )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(cores // num_csx))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_csx,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "headwater", *arguments)
    except ChildFailedError as error:
        return max(failure.exitcode for failure in error.failures.values()) or 1
    return 0


def join() -> Fabric:
    """The ranks of this run, of which this process is one."""
    if not is_rank():
        return ALONE
    return HostFabric()


def check_ranks(init: SetupConfig, trainable: Trainable, plan: Plan, fabric: Fabric) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: if that is asked for.
    """
    if fabric.size == 1:
        return
    asked = {
        "the disk tier": plan.tier != "memory" or plan.gradient_tier != "memory",
        "sparsity": bool(init.sparsity),
        "weights that follow others": bool(trainable.averages),
        "an accelerator": plan.device != "cpu",
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{what} on several CSXs is not in this version", where=_KEY, remedy="write 1")


def check_number(init: SetupConfig, fabric: Fabric) -> None:
    """Refuse to train on another number of ranks than the params ask for.

    Raises:
        ConfigError: if it is another one.
    """
    asked = init.backend.num_csx
    if asked == fabric.size:
        return
    remedy = f"write {fabric.size}"
    if fabric.size == 1:
        remedy += ", or start it with `headwater fit`, which trains models of the package on several"
    raise ConfigError(f"num_csx is {asked}, and there is {fabric.size}", where=_KEY, remedy=remedy)
