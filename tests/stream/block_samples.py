"""Blocks that another process can import."""

import atexit
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

PLACE = "HEADWATER_TEST_PLACE"
"""Environment variable: a file for the number of a process."""


class Shifted(nn.Module):
    """A block with two names for one weight, and a buffer of indices."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.again = self.linear
        self.register_buffer("order", torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))

    def forward(self, x, mask=None):
        y = self.again(self.linear(x))[..., self.order]
        return x + (y if mask is None else y * mask[..., None])


class Failing(Shifted):
    """A block that cannot compute with made-up values."""

    def forward(self, x, mask=None):
        raise ValueError("no values, no output")


class Talking(Shifted):
    """A block that prints lines when it is unpacked, and at the end of the process."""

    def __setstate__(self, state):
        super().__setstate__(state)
        print("unpacked", flush=True)
        atexit.register(print, "at the end")


class Killed(Shifted):
    """A block that kills the process which unpacks it, as the system does if memory is short."""

    def __setstate__(self, state):
        os.kill(os.getpid(), signal.SIGKILL)


class Waiting(Shifted):
    """A block whose unpacking does not end."""

    def __setstate__(self, state):
        write_number(os.getpid())
        time.sleep(600)


class Leaving(Shifted):
    """A block that leaves a process behind, as a compiler that has crashed may do."""

    def __setstate__(self, state):
        nothing = subprocess.DEVNULL
        left = subprocess.Popen(["sleep", "600"], stdin=nothing, stdout=nothing, stderr=nothing)
        write_number(left.pid)
        raise ValueError("it has crashed")


def write_number(process):
    """Write the number of a process to the file of `PLACE`, at once."""
    place = Path(os.environ[PLACE])
    place.with_suffix(".new").write_text(str(process))
    place.with_suffix(".new").rename(place)
