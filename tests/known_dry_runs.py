"""Dry runs that the cases of a test share when the cases differ only in the plan.

A dry run takes most of the time of a test with a tiny model, and its trace does not depend on the plan. So
the first case of a test makes the dry runs, and the cases with other plans use its traces. A test with
another model or other batches makes its own dry runs.

HEADWATER_ALL_DRY_RUNS=1 makes every case repeat its dry runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable

import pytest

OF_PLANS = frozenset({"plan", "setting", "tier", "gradient_tier"})
"""Parameters of tests that choose a plan; the model and the batches of a test never depend on them."""

_FOLDERS = frozenset({"api", "checkpoint", "integrations", "stream"})


class KnownDryRuns:
    """The traces of the test function that runs now; those of the function before are dropped."""

    def __init__(self) -> None:
        self._function: Hashable = None
        self._traces: dict[Hashable, object] = {}

    def of(self, item: pytest.Item) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the dry runs of a test use what is known."""
        case = getattr(item, "callspec", None)
        if item.path.parent.name not in _FOLDERS or case is None or not OF_PLANS & case.params.keys():
            return contextlib.nullcontext()
        if os.environ.get("HEADWATER_ALL_DRY_RUNS"):
            return contextlib.nullcontext()
        from headwater.plan.known_traces import KnownTraces

        function = (item.path, item.originalname)
        if function != self._function:
            self._function, self._traces = function, {}
        other = tuple((name, index) for name, index in sorted(case.indices.items()) if name not in OF_PLANS)
        return self._traces.setdefault(other, KnownTraces()).in_use()
