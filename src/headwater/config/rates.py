"""The option `--learning_rate`, for any optimizer and any schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.config.document import Document, put
from headwater.config.origins import KeyPath, Origin
from headwater.core.errors import ConfigError

_SCHEDULES: KeyPath = ("trainer", "init", "schedulers")
_OPTIMIZER: KeyPath = ("trainer", "init", "optimizer")
_RATES = ("learning_rate", "initial_learning_rate", "end_learning_rate", "eta_min")


def set_learning_rate(document: Document, rate: Any, origin: Origin) -> Document:
    """Return `document` with `rate` as its highest learning rate.

    All rates of schedules are scaled by the same factor. Without schedules, the optimizer's rate is set.

    Args:
        document: the params.
        rate: the new learning rate.
        origin: place where the user wrote it.

    Raises:
        ConfigError: if `rate` is not a number > 0, or the schedules have no rate that can be scaled.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise ConfigError(
            f"expected learning_rate to be a finite number > 0, got {rate!r}",
            where=str(origin),
            remedy="write for example 1e-4",
        )
    schedules = document.get(_SCHEDULES)
    if not schedules:
        return _set_of_optimizer(document, rate, origin)
    found = dict(_rates(schedules, _SCHEDULES))
    highest = max(found.values(), default=0)
    if not highest:
        raise ConfigError(
            "learning_rate cannot be applied: the schedules have no learning rate to scale",
            where=str(origin),
            remedy="set their keys by path, such as trainer.init.schedulers.0.StepLR.gamma=0.1",
        )
    for path, value in found.items():
        if not value:
            continue
        # The highest rate is exactly the given one, without a rounding error.
        document = put(document, path, rate if value == highest else value / highest * rate, origin)
    return document


def _set_of_optimizer(document: Document, rate: float, origin: Origin) -> Document:
    optimizer = document.get(_OPTIMIZER)
    names = (
        [name for name, value in optimizer.items() if value is not None]
        if isinstance(optimizer, dict)
        else []
    )
    if len(names) != 1:
        return document  # the schema reports the error in this section
    return put(document, (*_OPTIMIZER, names[0], "learning_rate"), rate, origin)


def _rates(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, float]]:
    """Yield the path and the value of each learning rate in `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        is_number = isinstance(inside, int | float) and not isinstance(inside, bool)
        if key in _RATES and is_number:
            yield (*path, key), inside
        else:
            yield from _rates(inside, (*path, key))
