"""The cases of a test share dry runs only if they differ in nothing but the plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headwater.plan.trace import trace_step
from known_dry_runs import COMPARE, KnownDryRuns


def case(name, folder="api", marked=(), **parameters):
    """Return what a hook sees of a case of the test `name`."""
    return SimpleNamespace(
        path=Path("tests", folder, "test_file.py"),
        originalname=name,
        callspec=SimpleNamespace(params=parameters),
        iter_markers=lambda name: [SimpleNamespace(args=tuple(marked))] if marked else [],
    )


def trace_in(known, item, width=4, layer=nn.Linear):
    with known.of(item):
        return trace_step(layer(width, width), torch.randn(2, width), loss_function=lambda m, x: m(x).sum())


@pytest.fixture(autouse=True)
def _sharing(monkeypatch):
    monkeypatch.delenv("HEADWATER_ALL_DRY_RUNS", raising=False)


def test_cases_with_another_plan_share_the_trace():
    known = KnownDryRuns()
    assert trace_in(known, case("a", plan="memory", size=1)) is trace_in(
        known, case("a", plan="disk", size=1)
    )


def test_cases_with_another_marked_parameter_share_the_trace():
    known = KnownDryRuns()
    first, second = (case("a", marked=["seed"], seed=seed, size=1) for seed in range(2))
    assert trace_in(known, first) is trace_in(known, second)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("plan", ["memory", "disk"])
def test_cases_that_pytest_makes_share_one_trace_for_each_model(plan, width, request):
    known, traces = KnownDryRuns(), {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == request.node.originalname:
            found = case("a", **item.callspec.params)
            trace = trace_in(known, found, item.callspec.params["width"])
            assert traces.setdefault(item.callspec.params["width"], trace) is trace
    assert width in traces


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


class Twice(nn.Linear):
    """A layer with the weights of a linear layer, and another computation."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_a_variable_compares_the_traces_that_cases_would_share(monkeypatch):
    monkeypatch.setenv("HEADWATER_ALL_DRY_RUNS", COMPARE)
    known, item = KnownDryRuns(), case("a", plan="memory")
    assert trace_in(known, item) == trace_in(known, item)
    with pytest.raises(AssertionError, match="changes the model"):
        trace_in(known, item, layer=Twice)
