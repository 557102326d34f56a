"""The way from the command line to a step is short."""

import sys

from headwater.core.errors import ConfigError
from headwater.stream.engine import Engine

MOST_CALLS = 6
"""From the function that parses the command line on; the guard that prints errors is around it."""


def test_few_calls_lead_from_main_to_a_step(headwater, params, monkeypatch):
    stacks = []

    def train_step(*_):
        frame, calls = sys._getframe(1), []
        while (frame.f_globals["__name__"], frame.f_code.co_name) != ("headwater.cli.main", "_run"):
            calls.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        stacks.append(calls)
        raise ConfigError("a step was reached")

    monkeypatch.setattr(Engine, "train_step", train_step)
    assert headwater("fit", params)[0] == 2
    assert len(stacks) == 1
    assert len(stacks[0]) + 1 <= MOST_CALLS, stacks[0]  # and the call of `train_step`
