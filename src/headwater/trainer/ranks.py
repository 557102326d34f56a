"""Runs of params on several compute ranks: how they start, and what they cannot do."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.api.ranks import refuse
from headwater.config.run import SetupConfig
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import Fabric
from headwater.fabric.membership import is_rank, join
from headwater.fabric.report import report
from headwater.plan.types import Plan
from headwater.trainer.job import Trainable

__all__ = ["check_number", "check_ranks", "is_rank", "join", "launch", "report"]

_KEY = "trainer.init.backend.cluster_config.num_csx"


def launch(num_csx: int, arguments: Sequence[str]) -> int:
    """Run a command of this program as several ranks on this machine; returns its exit code.

    Args:
        num_csx: how many.
        arguments: of the command line.

    Raises:
        ConfigError: if there are not so many cores.
        HeadwaterError: what the first rank that failed has met.
    """
    from headwater.fabric.launch import launch as launch_ranks  # it takes a while to import

    return launch_ranks(num_csx, ("-m", "headwater", *arguments), where=_KEY)


def check_ranks(init: SetupConfig, trainable: Trainable, plan: Plan, fabric: Fabric) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: if that is asked for.
    """
    if fabric.size == 1:
        return
    refused = {
        "gradients on disk": plan.gradient_tier == "disk",
        "the disk tier on several hosts": plan.tier == "disk" and fabric.num_hosts > 1,
        "sparsity": bool(init.sparsity),
        "weights that follow others": bool(trainable.averages),
        "an accelerator": plan.device != "cpu",
    }
    refuse([what for what, is_asked in refused.items() if is_asked], where=_KEY)


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
