"""Runs without a picture of their loss curve, for tests that do not look at it."""

import sys
from collections.abc import Callable

NO_PICTURES = "HEADWATER_NO_PICTURES"
"""Environment variable: quickly started processes draw no loss curve."""


def leave_pictures_out(set_attribute: Callable[..., None] = setattr) -> None:
    """Make runs of this process draw no loss curve, as if matplotlib were not installed."""
    module = sys.modules.get("headwater.trainer.loss_curve")
    if module is not None:
        set_attribute(module, "draw_loss_curve", lambda history, path: None)
