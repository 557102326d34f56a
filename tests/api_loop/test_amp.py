"""Loss scaling and the optimizer step, bit for bit against torch.amp and torch.nn.utils."""

import math

import pytest
import torch
from torch import nn

from headwater.api.amp import GradScaler, autocast, get_half_dtype, optimizer_step, set_half_dtype
from headwater.api.backend import backend
from headwater.api.compile import compile
from headwater.core.errors import CheckpointError, ConfigError, NonFiniteError, StreamError
from headwater.optim.loss_scale import LossScale

STEPS = 6
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


def job(seed=0, *, streamed=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    if streamed:
        compile(model, backend("CSX", num_slabs=2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def batches(bad=()):
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        inputs = torch.randn(8, 8, generator=generator)
        yield (inputs * math.inf if step in bad else inputs), torch.randint(4, (8,), generator=generator)


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def assert_equal(model, expected):
    for mine, torchs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize(
    ("scale", "clip"),
    [
        (None, {}),
        (128.0, {"max_gradient_value": 0.01}),
        ("dynamic", {"max_gradient_norm": 0.1}),
    ],
)
@both
def test_optimizer_step_equals_torch(scale, clip, streamed):
    model, optimizer = job(streamed=streamed)
    scaler = None if scale is None else GradScaler(scale)
    expected, torchs = job()
    for batch in batches():
        optimizer_step(loss_of(model, batch), optimizer, scaler, **clip)
        torchs.zero_grad()
        loss_of(expected, batch).backward()
        if "max_gradient_norm" in clip:
            nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        if "max_gradient_value" in clip:
            nn.utils.clip_grad_value_(expected.parameters(), 0.01)
        torchs.step()
    assert_equal(model, expected)


@both
@pytest.mark.parametrize("unscale", [False, True])
def test_a_dynamic_scale_equals_that_of_torch(unscale, streamed):
    model, optimizer = job(streamed=streamed)
    scaler = GradScaler("dynamic", init_scale=2.0**12, steps_per_increase=2)
    expected, torchs = job()
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for batch in batches(bad={1, 2}):
        for one, opt, by in [(model, optimizer, scaler), (expected, torchs, torch_scaler)]:
            opt.zero_grad()
            by.scale(loss_of(one, batch)).backward()
            if unscale:
                by.unscale_(opt)
                nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            by.step(opt)
            by.update()
        assert scaler.get_scale() == torch_scaler.get_scale()
        assert_equal(model, expected)


@both
def test_step_returns_true_if_it_was_applied(streamed):
    model, optimizer = job(streamed=streamed)
    scaler = GradScaler("dynamic", init_scale=8.0)
    applied = []
    for batch in batches(bad={1}):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        applied.append(scaler.step(optimizer))
        scaler.update()
    assert applied == [True, False, True, True, True, True] and scaler.get_scale() == 4.0


def test_one_of_two_optimizers_that_overflows_halves_the_scale():
    pairs = [job(seed) for seed in range(2)]
    scaler = GradScaler("dynamic", init_scale=8.0)
    for (model, optimizer), batch in zip(pairs, [next(batches(bad={0})), next(batches())], strict=True):
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_scaler_can_clip():
    model, optimizer = job()
    scaler = GradScaler("dynamic", max_gradient_norm=0.1)
    expected, torchs = job()
    for batch in batches():
        optimizer_step(loss_of(model, batch), optimizer, scaler)
        optimizer_step(loss_of(expected, batch), torchs, GradScaler("dynamic"), max_gradient_norm=0.1)
    assert_equal(model, expected)


def test_scale_takes_nested_tensors_and_widens_half_scalars():
    scaler = GradScaler(2.0**10)
    scaled = scaler.scale({"a": torch.tensor(2.0), "b": [torch.tensor(100.0, dtype=torch.float16)]})
    assert scaled["a"] == 2.0**11
    assert scaled["b"][0] == 102400.0, "past the range of fp16"


def test_a_loaded_scaler_continues_with_the_same_scale():
    scaler = GradScaler("dynamic", init_scale=2.0**10, steps_per_increase=3)
    model, optimizer = job()
    for _, batch in zip(range(2), batches(bad={0}), strict=False):
        optimizer_step(loss_of(model, batch), optimizer, scaler)
    resumed = GradScaler("dynamic", steps_per_increase=3)
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.get_scale() == 2.0**9
    for each in (scaler, resumed):
        for batch in list(batches())[:2]:
            optimizer_step(loss_of(model, batch), optimizer, each)
    assert resumed.get_scale() == scaler.get_scale() == 2.0**10
    with pytest.raises(CheckpointError, match=r"good_steps.*got scale"):
        resumed.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(("unscale", "streamed"), [(False, False), (True, False), (False, True)])
def test_a_gradient_that_overflows_at_the_smallest_scale_raises(unscale, streamed):
    model, optimizer = job(streamed=streamed)
    before = [param.clone() for param in model.parameters()]
    scaler = GradScaler("dynamic", init_scale=2.0)
    optimizer_step(loss_of(model, next(batches(bad={0}))), optimizer, scaler)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, next(batches(bad={0})))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(NonFiniteError, match="smallest loss scale"):
        scaler.step(optimizer)
    assert all(map(torch.equal, model.parameters(), before))


def test_overflows_up_to_the_tolerance_change_nothing():
    scale = LossScale(1024.0, dynamic=True, overflow_tolerance=0.25)
    values = []
    for applied in [True, True, True, False, False, False]:
        scale = scale.after(applied=applied)
        values.append(scale.value)
    # 1 of 4 steps is tolerated, 2 of 5 are not; then the count starts again: 1 of 1 is not tolerated.
    assert values == [1024, 1024, 1024, 1024, 512, 256]


def test_a_scale_stays_within_its_limits():
    low = LossScale(2.0, dynamic=True, smallest=2.0)
    assert low.after(applied=False).value == 2.0 and not low.may_skip
    high = LossScale(8.0, dynamic=True, growth_interval=1, largest=8.0)
    assert high.after(applied=True).value == 8.0


WRONG = {
    "expected loss_scale to be a finite number above 0, got 0": lambda: GradScaler(0.0),
    "expected loss_scale to be a finite number above 0, got 'dynamik'": lambda: GradScaler("dynamik"),
    "expected init_scale to be a finite number": lambda: GradScaler("dynamic", init_scale=-1),
    "expected steps_per_increase to be a finite number": lambda: GradScaler("dynamic", steps_per_increase=0),
    "expected init_scale between min_loss_scale .* and max_loss_scale 2.0, got 4.0": lambda: GradScaler(
        "dynamic", init_scale=4.0, max_loss_scale=2.0
    ),
    "expected one of max_gradient_norm and max_gradient_value, got both": lambda: clipped(
        max_gradient_norm=1.0, max_gradient_value=1.0
    ),
    "expected max_gradient_norm to be a finite number": lambda: clipped(max_gradient_norm=0.0),
    "expected max_gradient_value to be a finite number": lambda: clipped(max_gradient_value=math.inf),
    "expected bfloat16 or float16, got torch.float32": lambda: set_half_dtype(torch.float32),
    "expected bfloat16 or float16, got 'half'": lambda: set_half_dtype("half"),
}


def clipped(**clip):
    model, optimizer = job()
    optimizer_step(loss_of(model, next(batches())), optimizer, **clip)


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises(ConfigError, match=message):
        WRONG[message]()


def test_calls_in_the_wrong_order_are_named():
    _, optimizer = job()
    scaler = GradScaler("dynamic")
    with pytest.raises(StreamError, match=r"update\(\) was called before a step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(StreamError, match="unscaled already"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_autocast_computes_in_the_half_dtype(name):
    before = get_half_dtype()
    dtype = getattr(torch, name)
    try:
        assert set_half_dtype(name) is get_half_dtype() is set_half_dtype(dtype) is dtype
        with autocast():
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    finally:
        set_half_dtype(before)
