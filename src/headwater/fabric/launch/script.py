"""Ranks of a script that sets `num_csx` while it runs: the script is started again for each rank.

[Note: ranks of a script]
The first process reaches the call that sets the number of ranks, and becomes the launcher: it replaces itself
by a small program that runs the same command once for each rank. Each rank runs the script from the start. It
prints nothing up to that call, since the first process has printed all of it. After the call rank 0 prints,
and the other ranks never do. A rank that fails reports its error to the launcher, which prints it once and
ends the other ranks.

A script that `torchrun` or `srun` has started, on one host or several, is a rank already. At the call it
joins the other ranks, and from then on only rank 0 prints. Other ranks print a traceback if they
crash.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import sys
import traceback
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from headwater.core.errors import ConfigError, RankError
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.placement import Placement
from headwater.core.process_value import ProcessValue
from headwater.core.terminal import silence
from headwater.fabric.cluster import host_name, is_rank, join
from headwater.fabric.consistency import check_consistency, digest, program
from headwater.fabric.fabric import DEFAULT_TIMEOUT_S, Fabric
from headwater.fabric.launch.cores import check_cores
from headwater.fabric.launch.launcher import become_launcher
from headwater.fabric.launch.streams import OF_SCRIPT, STDERR, STDIN, STDOUT
from headwater.fabric.membership import current
from headwater.fabric.parent import find_parent
from headwater.fabric.report import report_traceback
from headwater.fabric.variables import PARENT

_stderr = ProcessValue[int | None](None)
"""A copy of the descriptor of stderr, made before stderr was redirected to /dev/null."""


def use_ranks(num_csx: int, *, where: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Run the rest of this script on `num_csx` ranks; see [Note: ranks of a script].

    Args:
        num_csx: number of ranks, at least 2.
        where: the place where the number is written, for errors.
        timeout_s: seconds to wait for another rank before an error is raised.

    Raises:
        ConfigError: if there are too few cores, the run has another number of ranks, the command cannot be
            started again, or ranks run different scripts.
        RankError: if the rendezvous fails.
    """
    # First, because it removes the variables of ranks from the environment of a program that a rank started.
    find_parent()
    if current().size > 1 or is_rank():
        _check_size(num_csx, int(os.environ["WORLD_SIZE"]), where)
    if current().size > 1:
        return
    if is_rank():
        if OF_SCRIPT in os.environ and not _is_started_by_launcher():
            raise RankError(
                "this process cannot become a rank: a rank has started it, or its launcher has ended",
                where=where,
                remedy="set num_csx=1 in a program that a rank starts",
            )
        fabric = join(timeout_s)
        if fabric.num_hosts > 1:
            check_consistency(fabric, program() | _script())
        _print_on_rank_0(fabric)
        return
    check_cores(num_csx, where=where)
    # This comes before `exec`. After it an error cannot name the place in the script.
    _check_command(num_csx, where)
    become_launcher(Placement(num_csx), sys.orig_argv[1:], where=where, of_script=True)


def _script() -> dict[str, str]:
    """Return the path and arguments of this rank's script, so that ranks of several hosts can be compared."""
    found = {f"argument {number}": word for number, word in enumerate(sys.argv[1:], start=1)}
    if Path(sys.argv[0]).is_file():
        found["script"] = digest([Path(sys.argv[0])])
    return found


def _check_size(num_csx: int, size: int, where: str) -> None:
    if num_csx != size:
        raise ConfigError(
            f"num_csx={num_csx}, but {size} ranks were started", where=where, remedy=f"write num_csx={size}"
        )


def _check_command(num_csx: int, where: str) -> None:
    """Raise `ConfigError` if the command of this process cannot be started again."""
    remedy = f"write the script to a file, and run it with python; or set num_csx=1 instead of {num_csx}"
    if hasattr(sys, "ps1") or sys.flags.interactive or hasattr(sys.modules["__main__"], "get_ipython"):
        raise ConfigError(
            "cannot start ranks: expected a script, got an interactive session", where=where, remedy=remedy
        )
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "cannot start ranks: this process was started by multiprocessing",
            where=where,
            remedy='set num_csx inside `if __name__ == "__main__"`',
        )
    if sys.argv[0] in ("", "-"):
        raise ConfigError("cannot start ranks: the script was read from stdin", where=where, remedy=remedy)
    if sys.argv[0] != "-c" and not Path(sys.argv[0]).exists():
        raise ConfigError(
            f"cannot start ranks: the script {sys.argv[0]} does not exist in {Path.cwd()}",
            where=where,
            remedy="set num_csx before the script changes its working directory or sys.argv",
        )


def begin() -> None:
    """Prepare a rank of a script: silence its output, and report its errors to the launcher."""
    if not _is_started_by_launcher():
        return  # a program that a rank has started
    find_parent()
    sys.excepthook = _report
    _stderr.value = os.dup(STDERR)
    silence(STDERR)


def _is_started_by_launcher() -> bool:
    return os.getppid() == int(os.environ.get(PARENT, "0"))


def _print_on_rank_0(fabric: Fabric) -> None:
    """Allow only rank 0 to print from now on, as [Note: ranks of a script] describes.

    Also set the random state of every rank to that of rank 0.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if OF_SCRIPT in os.environ and fabric.rank == 0:
        assert _stderr.value is not None, "`begin` was called when the package was imported"
        os.dup2(STDIN, STDOUT)
        os.dup2(_stderr.value, STDERR)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    elif fabric.rank > 0:
        silence(STDOUT)
    if OF_SCRIPT not in os.environ:
        _stderr.value = os.dup(STDERR)
        sys.excepthook = _report
        if fabric.rank > 0:
            # A crash, such as SIGSEGV, ends the rank without an exception, and should still print something.
            faulthandler.enable(_stderr.value)
            silence(STDERR)
    silence(STDIN)
    # The random states may differ, for example because the script has used the time as its seed.
    _share_random_state(fabric)


def _share_random_state(fabric: Fabric) -> None:
    """Set the random state of every rank to that of rank 0."""
    torch.set_rng_state(fabric.agree(torch.get_rng_state, torch.Tensor))
    random.setstate(fabric.agree(random.getstate, tuple[int, tuple[int, ...], float | None]))
    state = fabric.agree(_numpy_state, tuple[str, torch.Tensor, int, int, float])
    np.random.set_state((state[0], state[1].numpy().astype(np.uint32), *state[2:]))


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    """Return the random state of numpy."""
    name, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return str(name), words, int(position), int(has_normal), float(normal)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the exception that ends this rank, then exit at once: threads may be waiting for other ranks."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    text = "".join(traceback.format_exception(kind, error, trace))
    if OF_SCRIPT not in os.environ:  # the launcher of a script names the rank itself
        text = f"rank {current().rank} on {host_name()} has failed:\n{text}"
    if not interrupted and not report_traceback(text) and _stderr.value is not None:
        os.write(_stderr.value, text.encode())
    sys.stdout.flush()
    # A normal exit would wait for threads, and these may wait for other ranks.
    os._exit(INTERRUPTED if interrupted else 1)
