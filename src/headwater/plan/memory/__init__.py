"""Bytes of each part of a plan. `Footprint` (`plan/footprint.py`) adds them up by kind of memory."""
