"""Runs at the start of an interpreter whose PYTHONPATH has this folder.

These are programs that a quickly started process has executed, see [Note: quick starts], and processes that
Ray, Slurm and an SSH server start in tests.
"""

import os
import sys
from pathlib import Path

_handed_over = os.environ.pop("HEADWATER_QUICK_START", None)
if _handed_over is not None:
    _site = Path(__file__).absolute().parent
    sys.path.remove(str(_site))
    sys.path.insert(0, str(_site.parent.parent))
    from quick_start.client import take_over

    del sys.path[0]
    take_over(_handed_over)

if "HEADWATER_NO_PICTURES" in os.environ:
    sys.modules["matplotlib"] = None  # as if it were not installed, so no loss curve is drawn
