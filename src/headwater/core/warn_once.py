"""Warnings that a process logs once, however often their cause returns."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless this process has logged it with the same arguments before.

    A run may make several plans, and a script may compile several models.

    Args:
        logger: the logger.
        message: the message, with the placeholders of `logging`.
        args: values of the placeholders.
    """
    logger.warning(message, *args)
