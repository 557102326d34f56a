"""What every test shares."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator

import pytest

import quick_start
from shared_data import SHARED

_FOLDERS = [tempfile.mkdtemp(prefix="headwater-secret-")]
"""Folders of this session."""

os.environ["HEADWATER_SECRET_FILE"] = f"{_FOLDERS[0]}/ranks.secret"
"""Ranks that tests start have a secret of their own, and leave that of the user alone."""

if "HEADWATER_TEST_CACHE" not in os.environ:  # workers of pytest-xdist share that of the first process
    _FOLDERS.append(tempfile.mkdtemp(prefix="headwater-cache-"))
    os.environ["HEADWATER_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = _FOLDERS[-1]
"""The rates of the machine are measured once for all tests, and not where the user keeps theirs."""

_MANY_OBJECTS = 30_000

_ALLOWED_SKIPS = ("needs CUDA", "needs Slurm", "needs root")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests start processes quickly; workers of pytest-xdist start for real and import nothing early."""
    if not getattr(config.option, "numprocesses", None):
        quick_start.install()


def pytest_unconfigure() -> None:
    """Remove the folders of this session. Forked ranks do not come here, so they stay while tests run."""
    for folder in _FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def pools_of_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a small budget turns them off for its process; for the next test they are on again."""
    buffers = sys.modules.get("headwater.core.buffers")
    if buffers is not None:
        monkeypatch.setattr(buffers._POOLS, "keep", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first, so that at the end no worker waits for one of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the modules and the collected tests out of what the garbage collector goes through.

    Headwater looks through all objects for tensors and optimizers of the user's, at every first forward. Here
    nearly all objects belong to thousands of tests and to libraries.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """After a test that has imported much, leave that out, too."""
    if len(gc.get_objects()) > _MANY_OBJECTS:
        _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem) -> Generator[None, object, object]:
    """Tests with the mark `real_start` start their processes as a user does, also in fixtures."""
    with quick_start.real_starts() if item.get_closest_marker("real_start") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With HEADWATER_NO_SKIPS set, a test that skips for want of data or of a tool has failed."""
    report = yield
    if report.skipped and os.environ.get("HEADWATER_NO_SKIPS") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        without_data = not SHARED.is_dir() and " here" in reason
        if not without_data and not any(allowed in reason for allowed in _ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"nothing may be skipped here, but: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was left out, and why: with -q pytest tells only how much."""
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"left out: {count} tests, {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Generator[None, None, None]:
    """No test leaves hooks on what autograd saves: they would be everybody's."""
    yield
    if "torch" in sys.modules:
        import torch

        left = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert left is None, f"{left} still sees what autograd saves"
