"""Quick starts of Python processes: forks of a server that has imported torch and Headwater once.

Hundreds of tests start Python processes, and each would import torch, which takes 3 s of a core.

[Note: quick starts] `install()` changes how this process starts `python -m MODULE`, `python -c CODE` and
`python FILE`: through `subprocess`, and through the `spawn` of `multiprocessing`. A server, which is a child
of this process, forks the new process with CLONE_PARENT. So the new process is a child of this process like
any other: this process can wait for it. It gets its environment, folder, files, signals, session, process
group and cores as after a real start. The server has one thread. It imports, checks the native kernel of
Adam, and builds the checks of params, so that a fork finds the results. A fork whose environment may choose
other kernels checks them too. A forked process gets its own server at its start, while it is still clean. It
keeps that server when it executes another program in its place, as the launcher of ranks does.

A start is real where a fork could differ: other options of the interpreter, variables that libraries read
when they are loaded, `preexec_fn`, another user. Tests of the start, the imports or the memory of a process
have the mark `real_start`. HEADWATER_REAL_STARTS=1 makes all starts real.
"""

from quick_start.client import install, real_starts, with_site
from quick_start.pictures import NO_PICTURES, leave_pictures_out

__all__ = ["NO_PICTURES", "install", "leave_pictures_out", "real_starts", "with_site"]
