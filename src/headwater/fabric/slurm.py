"""Environment variables of ranks that `srun` has started, translated to those of `torch.distributed`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 20000, 10000


def is_task(environment: Mapping[str, str]) -> bool:
    """True if this process is one of several tasks of a step, and no other launcher has started it since."""
    return "RANK" not in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def as_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `torch.distributed` for a task.

    Rank 0 listens on the first host of the step. The port is computed from the numbers of job and step, since
    all tasks need it before they can communicate.

    Args:
        environment: the environment variables of the task.
    """
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "GROUP_RANK": environment["SLURM_NODEID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"])),
        # Port and host may be set by the user, for a network that Slurm does not know.
        "MASTER_PORT": environment.get("MASTER_PORT", str(_FIRST_PORT + (job * 31 + step) % _NUM_PORTS)),
    }


def first_host(hosts: str) -> str:
    """Return the first of a list of hosts such as `gpu[003-006,011],login1`."""
    found = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", hosts)
    assert found is not None, f"expected a list of hosts, got {hosts!r}"
    prefix, number, suffix = found.groups(default="")
    return f"{prefix}{number}{suffix}"
