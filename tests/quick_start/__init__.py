"""Quick starts of Python processes: forks of a server that has imported torch and Headwater once.

Hundreds of tests start Python processes, and each would import torch, which takes 3 s of a core.

[Note: quick starts] `install()` changes how this process starts `python -m MODULE`, `python -c CODE` and
`python FILE`: through `subprocess`, and through the `spawn` of `multiprocessing`. A server, which is a child of
this process, forks the new process with CLONE_PARENT. So it is a child of this process like any other: it can
be waited for, and gets its environment, folder, files, signals, session, process group and cores as after a
real start. The server is single-threaded and only imports.
A forked process gets a server of its own at its start, while it is still clean, and keeps that server when it
executes another program in its place, as the launcher of ranks does.

A start is real where a fork could differ: other options of the interpreter, variables that libraries read when
they are loaded, `preexec_fn`, another user. Tests that are about the start, the imports or the memory of a
process have the mark `real_start`. HEADWATER_REAL_STARTS=1 makes all starts real.
"""

from quick_start.client import install, real_starts

__all__ = ["install", "real_starts"]
