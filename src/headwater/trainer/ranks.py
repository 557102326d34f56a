"""Runs on several compute ranks: started on one machine, and what they cannot do."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headwater.config.run import SetupConfig
from headwater.core import errors
from headwater.core.errors import ConfigError, DoesNotFitError, HeadwaterError, RankError
from headwater.core.units import format_bytes
from headwater.fabric.cluster import join_ranks
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.types import Plan
from headwater.trainer.interrupt import EXIT_CODE
from headwater.trainer.job import Trainable

_PR_SET_PDEATHSIG = 1
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
        HeadwaterError: what the first rank that failed has met.
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
    # On another thread the agent leaves signals alone: it would end the ranks in the middle of a step.
    with ThreadPoolExecutor(1) as pool, _signals_for_ranks():
        done = pool.submit(elastic_launch(config, sys.executable), "-m", "headwater", *arguments)
        while not done.done():
            time.sleep(0.05)
    failure = done.exception()
    if isinstance(failure, ChildFailedError):
        return _exit_code(failure)
    done.result()
    return 0


@contextmanager
def _signals_for_ranks() -> Iterator[None]:
    """Ctrl-C reaches the ranks by itself, as they belong to the same job; SIGTERM is passed on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in psutil.Process().children():
            process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(failed: ChildFailedError) -> int:
    """The exit code of ranks that were interrupted.

    Raises:
        HeadwaterError: what the first that failed has met.
    """
    _, first = failed.get_first_failure()
    if first.exitcode == EXIT_CODE:
        return EXIT_CODE
    known = _read_error(first.error_file)
    if known is not None:
        raise known
    ended = f"was ended by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else "failed"
    raise RankError(
        f"rank {first.local_rank} (process {first.pid}) {ended}",
        remedy="see why; the same command goes on from the last complete checkpoint",
    )


def report(error: HeadwaterError) -> bool:
    """Tell the launcher of this rank what went wrong; whether there is one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    told = {"kind": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy}
    message = {"message": str(error), "extraInfo": {"timestamp": int(time.time()), "headwater": told}}
    Path(path).write_text(json.dumps({"message": message}))
    return True


def _read_error(path: str) -> HeadwaterError | None:
    try:
        told = json.loads(Path(path).read_text())["message"]["extraInfo"]["headwater"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kind: type[HeadwaterError] = getattr(errors, told["kind"])
    return kind(told["what"], where=told["where"], remedy=told["remedy"])


def join() -> Fabric:
    """The ranks of this run, of which this process is one."""
    if not is_rank():
        return ALONE
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # stop when the launcher is no more
    return join_ranks()


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
    _check_memory(plan, fabric)


def _check_memory(plan: Plan, fabric: Fabric) -> None:
    """The plan is that of one rank: all but the weight store and the gradients each of them takes anew."""
    if plan.prediction is None or plan.budget is None or plan.budget.host_memory is None:
        return
    parts = plan.prediction.host_parts
    shared = sum(parts.get(name, 0) for name in ("weight store", "gradients"))
    needed = shared + fabric.size * (sum(parts.values()) - shared)
    if needed > plan.budget.host_memory:
        raise DoesNotFitError(
            f"{fabric.size} CSXs need {format_bytes(needed)} of host memory together, "
            f"and the run may take {format_bytes(plan.budget.host_memory)}",
            where=_KEY,
            remedy="write a smaller num_csx or batch_size, or a larger host_memory",
        )


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
