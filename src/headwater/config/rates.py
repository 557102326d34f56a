"""The learning rate of a command line, whatever optimizer and schedules the params have."""

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

    The rates of schedules keep their proportions. Without schedules the rate is the optimizer's.

    Raises:
        ConfigError: if `rate` is not a number above 0, or the params have no rate that could be changed.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise ConfigError(
            f"learning_rate is a number above 0, found {rate!r}",
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
            "the schedules have no learning rate that could be scaled",
            where=str(origin),
            remedy="set their keys by their paths, such as trainer.init.schedulers.0.StepLR.gamma=0.1",
        )
    for path, value in found.items():
        if not value:
            continue
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
        return document  # the schema says what is wrong with the section
    return put(document, (*_OPTIMIZER, names[0], "learning_rate"), rate, origin)


def _rates(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, float]]:
    """Yield each learning rate in `value`, and where it is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        is_number = isinstance(inside, int | float) and not isinstance(inside, bool)
        if key in _RATES and is_number:
            yield (*path, key), inside
        else:
            yield from _rates(inside, (*path, key))
