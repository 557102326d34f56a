"""Ctrl-C at any line of the code of this project, after which the user trains the same model again."""

import itertools
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.compile import is_compiled

SOURCE = str(Path(hw.__file__).parent)
PRESSES = 60
"""Number of interrupted steps in each test."""


class Lines:
    """A trace function that counts the lines of this project, and presses Ctrl-C before one of them."""

    def __init__(self, press_at):
        self.press_at, self.count = press_at, 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.press_at:
                signal.raise_signal(signal.SIGINT)
        return self


@contextmanager
def counted_lines(press_at=None):
    lines, before = Lines(press_at), sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    finally:
        sys.settrace(before)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


class Loop:
    def __init__(self, model, *, autocast=False, traced=False):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.autocast = autocast
        self.step = hw.trace(self._step) if traced else self._step

    def _step(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            loss = self.model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


KINDS = {
    "memory": {},
    "disk": {"tier": "disk", "num_slabs": 2},
    "recomputed": {"activations": "recompute", "num_slabs": 2},
    "autocast": {"num_slabs": 2},
    "traced": {"tier": "disk", "num_slabs": 2},
}


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_made_whole_or_not_at_all_and_training_continues(kind, tmp_path):
    options = {"disk": str(tmp_path)} | KINDS[kind] if "tier" in KINDS[kind] else KINDS[kind]
    settings = {"autocast": kind == "autocast"}
    plain = Loop(make_model(), **settings)
    model = hw.compile(make_model(), hw.backend("CSX", **options))
    loop = Loop(model, **settings, traced=kind == "traced")
    batches = (torch.randn(4, 8) for _ in itertools.count())

    def both():
        batch = next(batches)
        loop.step(batch), plain.step(batch)
        assert all(map(torch.equal, plain.weights(), loop.weights()))

    both()
    with counted_lines() as lines:
        loop.step(batch := next(batches))
    plain.step(batch)
    for press_at in torch.linspace(1, lines.count, PRESSES).int().tolist():
        batch, before = next(batches), loop.weights()
        with suppress(KeyboardInterrupt), counted_lines(press_at):
            loop.step(batch)  # some steps have fewer lines
        if not all(map(torch.equal, before, loop.weights())):
            plain.step(batch)  # the optimizer's step was made
        both()
    hw.release(model)


def test_after_an_interrupt_of_compile_or_the_first_call_the_model_can_be_called():
    backend = hw.backend("CSX", num_slabs=2)
    with counted_lines() as lines:
        Loop(hw.compile(make_model(), backend)).step(torch.ones(4, 8))
    for press_at in torch.linspace(1, lines.count, 20).int().tolist():
        model, plain = make_model(), Loop(make_model())
        loop = Loop(model)
        with suppress(KeyboardInterrupt), counted_lines(press_at):
            hw.compile(model, backend)
            loop.step(torch.ones(4, 8))
        if not is_compiled(model):
            hw.compile(model, backend)
        if not all(map(torch.equal, plain.weights(), loop.weights())):
            plain.step(torch.ones(4, 8))  # the optimizer's step was made
        for _ in range(2):
            loop.step(torch.ones(4, 8)), plain.step(torch.ones(4, 8))
            assert all(map(torch.equal, plain.weights(), loop.weights())), press_at
        hw.release(model)
