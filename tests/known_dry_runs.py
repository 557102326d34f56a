"""Dry runs that the cases of a test share when the cases differ only in the plan.

A dry run takes most of the time of a test with a tiny model, and its trace does not depend on the plan. So
the first case of a test makes the dry runs, and the cases with other plans use its traces. A test with
another model or other batches makes its own dry runs.

The mark `same_dry_runs` names further parameters of a test that change neither the model nor its batches,
such as the optimizer.

HEADWATER_ALL_DRY_RUNS=1 makes every case repeat its dry runs. HEADWATER_ALL_DRY_RUNS=compare also asserts
that their traces are those that the cases would share.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable
from typing import Any

import pytest

OF_PLANS = frozenset({"plan", "setting", "tier", "gradient_tier"})
"""Parameters of tests that choose a plan; the model and the batches of a test never depend on them."""

COMPARE = "compare"

_FOLDERS = frozenset({"api", "checkpoint", "integrations", "stream"})


class KnownDryRuns:
    """The traces of the test function that runs now; those of the function before are dropped."""

    def __init__(self) -> None:
        self._function: Hashable = None
        self._traces: dict[Hashable, Any] = {}

    def of(self, item: pytest.Item) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the dry runs of a test use what is known."""
        case, wanted = getattr(item, "callspec", None), os.environ.get("HEADWATER_ALL_DRY_RUNS", "")
        if item.path.parent.name not in _FOLDERS or case is None or wanted not in ("", COMPARE):
            return contextlib.nullcontext()
        shared = OF_PLANS.union(*(mark.args for mark in item.iter_markers("same_dry_runs")))
        if not shared & case.params.keys():
            return contextlib.nullcontext()
        function = (item.path, item.originalname)
        if function != self._function:
            self._function, self._traces = function, {}
        # By identity: values may not be hashable, and pytest gives the values of each case their own indices.
        other = tuple((name, id(case.params[name])) for name in sorted(case.params.keys() - shared))
        if other not in self._traces:
            self._traces[other] = _known_traces(compared=wanted == COMPARE)
        return self._traces[other].in_use()


def _known_traces(*, compared: bool) -> Any:
    """Return empty `KnownTraces`. Imported here, so that tests without Headwater do not import it."""
    from headwater.plan.known_traces import KnownTraces

    class Compared(KnownTraces):
        """Traces that every run makes again, and that must be equal to those of the first run."""

        def get(self, conditions: Hashable, make: Callable[[], Any]) -> Any:
            made = make()
            known = super().get(conditions, lambda: made)
            assert known == made, "this test has a parameter that changes the model or its batches"
            return made

    return Compared() if compared else KnownTraces()
