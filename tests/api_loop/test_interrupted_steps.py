"""Ctrl-C at any function of this project, after which the user trains the same model again."""

import io
import itertools
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.compile import is_compiled
from headwater.api.transaction import is_open
from headwater.core.errors import StreamError

# The frames of a kept error may hold views of weights, as in a notebook; Headwater warns of these.
pytestmark = pytest.mark.filterwarnings("ignore::headwater.api.references.StaleTensorWarning")

SOURCE = str(Path(hw.__file__).parent)
PRESSES = 60
"""Number of interrupted steps in each test."""


class Moments:
    """A profile function that counts the moments in this project at which Python raises, and presses Ctrl-C.

    Python looks for signals when a function begins and when a function in C has returned.
    """

    def __init__(self, press_at):
        self.press_at, self.count = press_at, 0

    def __call__(self, frame, event, arg):
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(SOURCE):
            self.count += 1
            if self.count == self.press_at:
                signal.raise_signal(signal.SIGINT)


@contextmanager
def counted(press_at=None):
    moments, before = Moments(press_at), sys.getprofile()
    sys.setprofile(moments)
    try:
        yield moments
    finally:
        sys.setprofile(before)


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def pressed():
    """Return a function that calls another one and presses Ctrl-C in it. It keeps the last error."""
    last = []

    def call(function, press_at):
        try:
            with counted(press_at):
                function()
        except KeyboardInterrupt as error:
            last[:] = [error]

    return call


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


class Loop:
    def __init__(self, model, *, autocast=False, traced=False):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.autocast = autocast
        self.step = hw.trace(self._step) if traced else self._step

    def loss(self, batch):
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            return self.model(batch).square().mean()

    def _step(self, batch):
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


def assert_same(loop, plain, place=None):
    assert all(map(torch.equal, plain.weights(), loop.weights())), place


KINDS = {
    "memory": {},
    "disk": {"tier": "disk", "num_slabs": 2},
    "recomputed": {"activations": "recompute", "num_slabs": 2},
    "autocast": {"num_slabs": 2},
    "traced": {"tier": "disk", "num_slabs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_made_whole_or_not_at_all_and_training_continues(kind, pressed, tmp_path):
    options = {"disk": str(tmp_path)} | KINDS[kind] if "tier" in KINDS[kind] else KINDS[kind]
    settings = {"autocast": kind == "autocast"}
    plain = Loop(make_model(), **settings)
    model = hw.compile(make_model(), hw.backend("CSX", **options))
    loop = Loop(model, **settings, traced=kind == "traced")
    batches = (torch.randn(4, 8) for _ in itertools.count())

    def both(place=None):
        batch = next(batches)
        loop.step(batch), plain.step(batch)
        assert_same(loop, plain, place)

    both()
    with counted() as moments:
        loop.step(batch := next(batches))
    plain.step(batch)
    for press_at in torch.linspace(1, moments.count, PRESSES).int().tolist():
        batch, before = next(batches), loop.weights()
        pressed(lambda batch=batch: loop.step(batch), press_at)
        if not all(map(torch.equal, before, loop.weights())):
            plain.step(batch)  # the optimizer's step was made
        both(press_at)
    hw.release(model)
    assert_same(loop, plain)


def test_gradients_of_an_interrupted_backward_are_dropped_by_zero_grad(pressed):
    plain, loop = Loop(make_model()), Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2)))
    batch = torch.ones(4, 8)
    loop.step(batch), plain.step(batch)
    loss, plain_loss = loop.loss(batch), plain.loss(batch)
    loop.optimizer.zero_grad()
    with counted() as moments:
        loss.backward(retain_graph=True)
    plain.optimizer.zero_grad()
    plain_loss.backward()
    for press_at in range(1, moments.count):
        pressed(lambda: loss.backward(retain_graph=True), press_at)
        loop.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        pairs = zip(loop.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(param.grad, other.grad) for param, other in pairs), press_at
    pressed(lambda: loss.backward(retain_graph=True), moments.count // 2)
    loop.optimizer.zero_grad()
    hw.release(loop.model)
    assert all(param.grad is None for param in loop.model.parameters())


def test_gradients_that_an_interrupted_step_has_used_count_as_consumed(pressed):
    loop = Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2)))
    batch = torch.ones(4, 8)
    loop.step(batch)
    loop.optimizer.zero_grad()
    loop.loss(batch).backward()
    with counted() as moments:
        loop.optimizer.step()
    for press_at in torch.linspace(1, moments.count, 30).int().tolist():
        loop.optimizer.zero_grad()
        loop.loss(batch).backward()
        before = loop.weights()
        pressed(loop.optimizer.step, press_at)
        if not all(map(torch.equal, before, loop.weights())):
            loop.loss(batch).backward()  # plain PyTorch would add to the gradients that the step has used
            with pytest.raises(StreamError, match="has consumed"):
                loop.optimizer.step()


def test_a_traced_step_that_is_interrupted_as_it_begins_is_closed(pressed):
    plain = Loop(make_model())
    loop = Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2)), traced=True)
    batch = torch.ones(4, 8)
    loop.step(batch), plain.step(batch)
    with counted() as moments:
        loop.step(batch)
    plain.step(batch)
    for press_at in range(1, moments.count // 8):
        before = loop.weights()
        pressed(lambda: loop.step(batch), press_at)
        assert not is_open(), press_at
        if not all(map(torch.equal, before, loop.weights())):
            plain.step(batch)
    assert_same(loop, plain)


def test_after_an_interrupt_of_compile_or_the_first_call_the_model_can_be_called(pressed):
    backend = hw.backend("CSX", num_slabs=2)
    with counted() as moments:
        Loop(hw.compile(make_model(), backend)).step(torch.ones(4, 8))
    for press_at in torch.linspace(1, moments.count, 20).int().tolist():
        model, plain = make_model(), Loop(make_model())
        loop = Loop(model)

        def begin(model=model, loop=loop):
            hw.compile(model, backend)
            loop.step(torch.ones(4, 8))

        pressed(begin, press_at)
        if not is_compiled(model):
            hw.compile(model, backend)
        if not all(map(torch.equal, plain.weights(), loop.weights())):
            plain.step(torch.ones(4, 8))  # the optimizer's step was made
        for _ in range(2):
            loop.step(torch.ones(4, 8)), plain.step(torch.ones(4, 8))
            assert_same(loop, plain, press_at)
        hw.release(model)


def test_an_interrupted_load_of_optimizer_state_can_be_repeated(pressed):
    plain = Loop(make_model())
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), 1e-2, amsgrad=True)
    plain.step(torch.ones(4, 8))
    state = plain.optimizer.state_dict()

    def loop_that_has_begun():
        loop = Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2)))
        loop.step(torch.ones(4, 8))
        return loop

    loop = loop_that_has_begun()
    with counted() as moments:
        loop.optimizer.load_state_dict(state)
    for press_at in torch.linspace(1, moments.count, 20).int().tolist():
        loop = loop_that_has_begun()
        pressed(lambda loop=loop: loop.optimizer.load_state_dict(state), press_at)
        loop.optimizer.load_state_dict(state)
        loop.step(torch.ones(4, 8))
        hw.release(loop.model)


def test_a_closure_of_the_user_in_a_traced_step_is_interrupted_at_once():
    loop, done = Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2))), []

    @hw.step_closure
    def closure():
        signal.raise_signal(signal.SIGINT)
        done.append("closure")

    @hw.trace
    def step(batch):
        loop.step(batch)
        closure()

    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(4, 8))
    assert not done


@contextmanager
def pressed_in(function, event, *, after=None, of=None):
    """Press Ctrl-C at the first event of this kind in a function of the project.

    With `after`, only below a function of this name; with `of`, only at the return of this function in C.
    """
    is_done = False

    def names(frame):
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back

    def watch(frame, kind, arg):
        nonlocal is_done
        if is_done or kind != event or frame.f_code.co_name != function:
            return
        if of is not None and arg.__name__ != of:
            return
        if frame.f_code.co_filename.startswith(SOURCE) and (after is None or after in names(frame)):
            is_done = True
            signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            yield raised
    finally:
        sys.setprofile(before)
    assert is_done


@pytest.mark.timeout(60)
def test_a_save_of_weights_that_was_interrupted_keeps_no_lock(tmp_path):
    backend = hw.backend("CSX", tier="disk", disk=str(tmp_path), num_slabs=2)
    loop = Loop(hw.compile(make_model(), backend))
    loop.step(torch.ones(4, 8))
    kept = []  # as a notebook keeps the last error
    with pressed_in("gather", "c_return", of="copy_") as raised:
        torch.save(loop.model.state_dict(), io.BytesIO())
    kept.append(raised.value)
    loop.step(torch.ones(4, 8))


@pytest.mark.parametrize("function", ["gather", "replace"])
def test_an_assignment_of_data_that_was_interrupted_can_be_repeated(function):
    loop = Loop(hw.compile(make_model(), hw.backend("CSX", num_slabs=2)))
    loop.step(torch.ones(4, 8))
    params = list(loop.model.parameters())
    expected, backup = loop.weights(), [param.data for param in params]

    def swap():
        for param in params:
            param.data = torch.full_like(param, 0.5)

    with pressed_in(function, "call", after="assign_data"):
        swap()
    swap()
    for param, values in zip(params, backup, strict=True):
        param.data = values
    assert all(map(torch.equal, expected, loop.weights()))


def test_a_copy_that_was_interrupted_counts_as_a_change():
    model = hw.compile(make_model(), hw.backend("CSX"))
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    loss, weight = model(torch.ones(4, 8)).square().mean(), model[1][0].weight
    with pressed_in("write_param", "call"), torch.no_grad():
        weight.copy_(torch.ones(8, 8))
    if torch.equal(weight.detach().clone(), torch.ones(8, 8)):
        with pytest.raises((RuntimeError, StreamError), match=r"modified|changed"):
            loss.backward()


def test_an_interrupted_step_updates_streamed_and_plain_parameters():
    class WithUnused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x) + 0 * self.unused.weight.detach().sum()

    model, scale = hw.compile(WithUnused(), hw.backend("CSX")), nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)

    def backward():
        (model(torch.ones(4, 8)) * scale).square().mean().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    before, before_scale = model.used.weight.detach().clone(), scale.detach().clone()
    with pressed_in("_commit_to", "call"):
        optimizer.step()
    assert not torch.equal(before, model.used.weight.detach().clone())
    assert not torch.equal(before_scale, scale)
    optimizer.zero_grad()
    optimizer.step(backward)


def test_a_model_is_planned_again_after_ctrl_c_in_its_dry_run():
    model = hw.compile(make_model(), hw.backend("CSX"))
    model(torch.ones(2, 8)).sum().backward()
    with pressed_in("trace_step", "call"):
        model(torch.ones(8, 8))
    model.zero_grad()
    assert model(torch.ones(8, 8)).shape == (8, 8)
