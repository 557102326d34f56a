"""Fixtures and hooks of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

import known_command_traces
import quick_start
from known_dry_runs import KnownDryRuns
from known_rates import KnownRates
from read_only import protected as protected
from shared_data import SHARED

_FOLDERS = [tempfile.mkdtemp(prefix="headwater-secret-")]
"""Folders of this session."""

os.environ["HEADWATER_SECRET_FILE"] = f"{_FOLDERS[0]}/ranks.secret"
"""Ranks that tests start use this secret instead of the user's."""

if "HEADWATER_TEST_CACHE" not in os.environ:  # workers of pytest-xdist share that of the first process
    _FOLDERS.append(tempfile.mkdtemp(prefix="headwater-cache-"))
    os.environ["HEADWATER_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = _FOLDERS[-1]
"""The rates of the machine are measured once for all tests, and cached apart from those of the user."""

os.environ[quick_start.NO_PICTURES] = "1"

if "HEADWATER_TEST_CUDA" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
"""Tests compare bits with the CPU, and some start more ranks than there are GPUs."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""Tests interrupt processes. A shell starts commands in its background so that they ignore SIGINT."""

hypothesis.settings.register_profile(
    "unhurried", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "search", hypothesis.settings.get_profile("unhurried"), derandomize=False
)
hypothesis.settings.load_profile("unhurried")
"""On a busy machine an example may take long, and so may its generation.

Each run has the same examples, so that a test fails only after a change. The option
`--hypothesis-profile search` draws others.
"""

_MANY_OBJECTS = 30_000

_DRY_RUNS = KnownDryRuns()

_TRACES = Path(os.environ["HEADWATER_TEST_CACHE"], "traces")

_RATES = KnownRates(Path(os.environ["HEADWATER_TEST_CACHE"], "headwater", "calibration.json"))

_ALLOWED_SKIPS = ("needs CUDA", "needs Slurm", "needs root", "needs a processor")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests on the device double."""
    parser.addoption("--device-seeds", type=int, default=6, help="seeds of each test on the device double")
    parser.addoption("--first-device-seed", type=int, default=0, help="the first of these seeds")
    parser.addoption("--on-device", type=int, help="run engines of tests/stream on a double with this seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument `device_seed` once for each seed."""
    if "device_seed" in metafunc.fixturenames:
        first, count = map(metafunc.config.getoption, ("--first-device-seed", "--device-seeds"))
        metafunc.parametrize("device_seed", range(first, first + count))


def pytest_configure(config: pytest.Config) -> None:
    """Fork the processes that tests start from one with imports; workers of pytest-xdist start as usual.

    On a machine with a GPU they start as usual too: it may lack packages that the imports need.
    """
    if not getattr(config.option, "numprocesses", None) and "HEADWATER_TEST_CUDA" not in os.environ:
        quick_start.install()


def pytest_unconfigure() -> None:
    """Remove the folders of this session. Forked ranks never call this, so the folders outlive them."""
    for folder in _FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the loss curve of a run, which takes up to 0.6 s, only in tests with the mark `pictures`."""
    if request.node.get_closest_marker("pictures"):
        monkeypatch.delenv(quick_start.NO_PICTURES, raising=False)
    else:
        quick_start.leave_pictures_out(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def pools_of_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the pools on again for the next test: a run in a small budget turns them off for its process."""
    buffers = sys.modules.get("headwater.core.buffers")
    if buffers is not None:
        monkeypatch.setattr(buffers._MALLOC, "pools_keep", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no worker runs one of them alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the modules and the collected tests from garbage collection.

    Headwater searches all objects for the user's tensors and optimizers at every first forward. In tests
    nearly all objects belong to thousands of tests and to libraries.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """After a test with large imports, exclude these objects too."""
    if len(gc.get_objects()) > _MANY_OBJECTS:
        _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem) -> Generator[None, object, object]:
    """Start processes as a user does in tests with the mark `real_start`, also in fixtures.

    Tests of commands share their dry runs.
    """
    with contextlib.ExitStack() as stack:
        if item.get_closest_marker("real_start"):
            stack.enter_context(quick_start.real_starts())
        if known_command_traces.are_shared(item.path):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv(known_command_traces.FOLDER, str(_TRACES))
            known_command_traces.share_traces(_TRACES, patch.setattr)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep the rates of the machine, so that no process checks or measures them again."""
    _RATES.renew()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item) -> Generator[None, object, object]:
    """Share the dry runs of a test's cases that differ only in the plan."""
    with _DRY_RUNS.of(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that skips without data or a tool as failed if HEADWATER_NO_SKIPS is set."""
    report = yield
    if report.skipped and os.environ.get("HEADWATER_NO_SKIPS") and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        without_data = not SHARED.is_dir() and " here" in reason
        if not without_data and not any(allowed in reason for allowed in _ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"nothing may be skipped here, but: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons for which tests were skipped: with -q pytest prints only their number."""
    reports = terminalreporter.getreports("skipped")
    reasons = Counter(str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"left out: {count} tests, {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Generator[None, None, None]:
    """Assert that no test leaves hooks on the tensors that autograd saves, since these hooks are global."""
    yield
    if "torch" in sys.modules:
        import torch

        left = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert left is None, f"{left} still sees what autograd saves"
