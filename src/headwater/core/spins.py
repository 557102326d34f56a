"""The time for which OpenMP threads that wait for each other keep their core. This module imports no torch.

OpenMP reads the settings when torch is first imported, so they are set before.
"""

from __future__ import annotations

import os

_VARIABLE, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_SHORT = "10000"


def spin_shortly() -> None:
    """Make waiting threads spin for about 20 µs before they yield their core, unless the user has set this.

    The default is 30 times longer: on a busy machine the waiting threads then occupy the cores that the
    working thread needs, and a small model can become 20 times slower.
    """
    if _POLICY not in os.environ:
        os.environ.setdefault(_VARIABLE, _SHORT)


def never_spin() -> None:
    """Make waiting threads yield their core at once, unless the user has set this.

    For commands that compute a little at a time: beside another program, the 20 µs of `spin_shortly` make
    such a command several times slower. Without other programs both take the same time.
    """
    # A parent that has imported this package passes the value that `spin_shortly` has set on to this process.
    # So this value does not mean that the user has set it.
    if _POLICY not in os.environ and os.environ.get(_VARIABLE, _SHORT) == _SHORT:
        os.environ[_VARIABLE] = "0"
