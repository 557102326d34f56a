"""Python processes that do not import modules from the working folder.

[Note: planted modules] `python -c` and `python -m` look for modules in the working folder first. In a folder
that others can write to, another user can plant a `multiprocessing.py` there. `-P` prevents this for
processes that Headwater starts by a command line. multiprocessing writes its command lines itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "PYTHONSAFEPATH"


@contextmanager
def safe_path() -> Iterator[None]:
    """Enter a context. Python processes that start inside cannot import modules from the working folder.

    A process that multiprocessing spawns still gets the whole module path of this process later on, so that
    it finds the user's modules.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
