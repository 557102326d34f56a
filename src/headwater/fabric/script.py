"""A script that says in the middle on how many ranks it runs: started anew for each of them.

[Note: ranks of a script]
The first process comes to where the number is said, and becomes the launcher: it gives its place to a small
program that runs the same command once for each rank. These are silent up to where the first process was,
for it has said already what there was to say; from there on rank 0 speaks, and the others never do. An error
that ends one is told the launcher, which says it once and ends the others.

A script that `torchrun` or `srun` has started, on one host or on several, is a rank already: where the number
is said it joins the others, and rank 0 alone speaks from there on.
"""

from __future__ import annotations

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
from headwater.fabric.alike import check_alike, digest, program
from headwater.fabric.cluster import host_name
from headwater.fabric.cores import check_cores
from headwater.fabric.fabric import DEFAULT_TIMEOUT_S, Fabric
from headwater.fabric.launch import become_launcher
from headwater.fabric.membership import current, is_rank, join
from headwater.fabric.parent import PARENT, find_parent
from headwater.fabric.report import report_traceback
from headwater.fabric.streams import OF_SCRIPT, STDERR, STDIN, STDOUT, silence

_stderr: int | None = None  # where it went before it was silenced


def use_ranks(num_csx: int, *, where: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """From here on this script runs on so many ranks; see [Note: ranks of a script].

    Args:
        num_csx: how many, at least 2.
        where: the number was written; for errors.
        timeout_s: how long another rank may keep this one waiting.

    Raises:
        ConfigError: if there are not so many cores, another number was said before, there is no command
            to run again, or ranks run different scripts.
        RankError: if the ranks do not find each other.
    """
    find_parent()
    if current().size > 1 or is_rank():
        _check_size(num_csx, int(os.environ["WORLD_SIZE"]), where)
    if current().size > 1:
        return
    if is_rank():
        if OF_SCRIPT in os.environ and not _is_started_by_launcher():
            raise RankError(
                "this process is no rank: it was started by one, or its launcher is gone",
                where=where,
                remedy="write num_csx=1 in what a rank starts",
            )
        fabric = join(timeout_s)
        if fabric.num_hosts > 1:
            check_alike(fabric, program() | _script())
        _speak(fabric)
        return
    check_cores(num_csx, where=where)
    _check_command(num_csx, where)
    become_launcher(Placement(num_csx), sys.orig_argv[1:], where=where, of_script=True)


def _script() -> dict[str, str]:
    """What ranks on several hosts run."""
    told = {f"argument {number}": word for number, word in enumerate(sys.argv[1:], start=1)}
    if Path(sys.argv[0]).is_file():
        told["script"] = digest([Path(sys.argv[0])])
    return told


def _check_size(num_csx: int, size: int, where: str) -> None:
    if num_csx != size:
        raise ConfigError(
            f"num_csx is {num_csx}, and there are {size} ranks", where=where, remedy=f"write num_csx={size}"
        )


def _check_command(num_csx: int, where: str) -> None:
    """Refuse what cannot be started again."""
    remedy = f"write the loop into a file, and run it with python; or write num_csx=1 in place of {num_csx}"
    if hasattr(sys, "ps1") or sys.flags.interactive or hasattr(sys.modules["__main__"], "get_ipython"):
        raise ConfigError(
            "ranks run a script, and this is an interactive session", where=where, remedy=remedy
        )
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "ranks are started by the first process of a script, and another has started this one",
            where=where,
            remedy='say num_csx below if __name__ == "__main__"',
        )
    if sys.argv[0] in ("", "-"):
        raise ConfigError("ranks run a script, and this one came by a pipe", where=where, remedy=remedy)
    if sys.argv[0] != "-c" and not Path(sys.argv[0]).exists():
        raise ConfigError(
            f"ranks run {sys.argv[0]} again, and it is not to be found in {Path.cwd()}",
            where=where,
            remedy="say num_csx before the script changes its folder or its arguments",
        )


def begin() -> None:
    """Be a rank of a script, started by the launcher: silent for now, and errors are for the launcher."""
    global _stderr
    if not _is_started_by_launcher():
        return  # something that a rank has started
    find_parent()
    sys.excepthook = _report
    _stderr = os.dup(STDERR)
    silence(STDERR)


def _is_started_by_launcher() -> bool:
    return os.getppid() == int(os.environ.get(PARENT, "0"))


def _speak(fabric: Fabric) -> None:
    """The rank has come to where the first process was: from now on rank 0 is heard."""
    global _stderr
    sys.stdout.flush()
    sys.stderr.flush()
    if OF_SCRIPT in os.environ and fabric.rank == 0:
        assert _stderr is not None, "it was silenced when the package was imported"
        os.dup2(STDIN, STDOUT)
        os.dup2(_stderr, STDERR)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    elif fabric.rank > 0:
        silence(STDOUT)
    if OF_SCRIPT not in os.environ:
        _stderr = os.dup(STDERR)
        sys.excepthook = _report
        if fabric.rank > 0:
            silence(STDERR)
    silence(STDIN)
    _draw_alike(fabric)


def _draw_alike(fabric: Fabric) -> None:
    """Let every rank draw the random numbers that rank 0 draws."""
    torch.set_rng_state(fabric.agree(torch.get_rng_state, torch.Tensor))
    random.setstate(fabric.agree(random.getstate, tuple[int, tuple[int, ...], float | None]))
    state = fabric.agree(_numpy_state, tuple[str, torch.Tensor, int, int, float])
    np.random.set_state((state[0], state[1].numpy().astype(np.uint32), *state[2:]))


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    """Return the state of numpy's random numbers."""
    name, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return str(name), words, int(position), int(has_normal), float(normal)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends this rank, said to the launcher. Threads that wait for other ranks are not waited for."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    text = "".join(traceback.format_exception(kind, error, trace))
    if OF_SCRIPT not in os.environ:  # it would say which rank it was
        text = f"rank {current().rank} on {host_name()} has failed:\n{text}"
    if not interrupted and not report_traceback(text) and _stderr is not None:
        os.write(_stderr, text.encode())
    sys.stdout.flush()
    os._exit(INTERRUPTED if interrupted else 1)
