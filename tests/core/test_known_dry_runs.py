"""The cases of a test share dry runs only if they differ in nothing but the plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headwater.plan.trace import trace_step
from known_dry_runs import KnownDryRuns


def case(name, folder="api", **parameters):
    """Return what a hook sees of a case of the test `name`."""
    callspec = SimpleNamespace(
        params=parameters, indices={key: hash(value) for key, value in parameters.items()}
    )
    return SimpleNamespace(path=Path("tests", folder, "test_file.py"), originalname=name, callspec=callspec)


def trace_in(known, item, width=4):
    with known.of(item):
        return trace_step(
            nn.Linear(width, width), torch.randn(2, width), loss_function=lambda m, x: m(x).sum()
        )


@pytest.fixture(autouse=True)
def _sharing(monkeypatch):
    monkeypatch.delenv("HEADWATER_ALL_DRY_RUNS", raising=False)


def test_cases_with_another_plan_share_the_trace():
    known = KnownDryRuns()
    assert trace_in(known, case("a", plan="memory", size=1)) is trace_in(
        known, case("a", plan="disk", size=1)
    )


@pytest.mark.parametrize(
    "other",
    [
        case("a", plan="memory", size=2),
        case("b", plan="memory", size=1),
        case("a", folder="plan", plan="memory", size=1),
    ],
    ids=["another size", "another test", "another folder"],
)
def test_other_cases_make_their_own_dry_run(other):
    known = KnownDryRuns()
    assert trace_in(known, case("a", plan="memory", size=1)) is not trace_in(known, other)


def test_another_model_makes_its_own_dry_run():
    known, item = KnownDryRuns(), case("a", plan="memory")
    assert trace_in(known, item).stages != trace_in(known, item, width=8).stages


def test_a_variable_makes_every_case_repeat_its_dry_runs(monkeypatch):
    monkeypatch.setenv("HEADWATER_ALL_DRY_RUNS", "1")
    known, item = KnownDryRuns(), case("a", plan="memory")
    assert trace_in(known, item) is not trace_in(known, item)
