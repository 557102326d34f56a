"""Runs at the start of a program that a quickly started process has executed; see [Note: quick starts]."""

import os
import sys

_handed_over = os.environ.pop("HEADWATER_QUICK_START", None)
if _handed_over is not None:
    _site = os.path.dirname(os.path.abspath(__file__))
    sys.path.remove(_site)
    sys.path.insert(0, os.path.dirname(os.path.dirname(_site)))
    from quick_start.client import take_over

    del sys.path[0]
    take_over(_handed_over)
