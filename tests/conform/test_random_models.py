"""Small random models, each plain and under two plans: equal to the bit, or refused with a HeadwaterError.

`headwater conform --random 10000` draws larger ones.
"""

import gc

import pytest
import torch

from headwater.api import planner
from headwater.conform.grammar.draw import draw
from headwater.conform.grammar.judge import BAD, draw_plans, judge, usable
from headwater.conform.grammar.standalone import standalone
from headwater.plan.calibrate import calibrate

SEED, MODELS, PARTS = 7, 200, 5
SMALL = (1, 1)
"""The most features of a model and of its loop, so that a model takes about 0.2 s."""


@pytest.fixture(autouse=True)
def same_conditions(monkeypatch):
    """Use one thread, and look up the rates of the machine once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates = calibrate("cpu")
    monkeypatch.setattr(planner, "calibrate", lambda *args, **options: rates)
    yield
    torch.set_num_threads(threads)


def drawn(case):
    for attempt in range(50):
        program = draw(SEED, case, attempt, SMALL)
        plain = usable(program)
        if plain is not None:
            return program, plain
    raise AssertionError(f"no program of case {case} runs in plain PyTorch")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_models_are_equal_or_refused(part):
    for case in range(part, MODELS, PARTS):
        gc.collect()
        gc.freeze()  # the engine looks through all objects that are not frozen, once for each model
        program, plain = drawn(case)
        for finding in judge(program, plain, draw_plans(SEED, case)):
            assert finding.verdict not in BAD, f"{finding}\n{standalone(program, finding.plan)}"
