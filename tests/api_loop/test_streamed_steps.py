"""A failed step of a streamed model leaves no trace: the loop continues as if it had not run."""

import pytest
import torch
from torch import nn

from headwater.api.backend import backend
from headwater.api.compile import compile
from headwater.api.step import step_closure, trace


class Model(nn.Module):
    """Two layers, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs):
        return self.second(self.norm(self.first(inputs)).relu())


def make(*, streamed):
    torch.manual_seed(0)
    model = Model()
    if streamed:
        compile(model, backend("CSX", num_slabs=2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


class Interrupted(Exception):
    """The error that a test raises in a step."""


def make_step(model, optimizer, noted):
    note = step_closure(lambda loss: noted.append(loss.item()))

    @trace
    def step(batch, fails=None):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        note(loss)
        if fails == "after forward":
            raise Interrupted
        loss.backward()
        if fails == "after backward":
            raise Interrupted
        optimizer.step()
        if fails == "after the optimizer":
            raise Interrupted

    return step


@pytest.mark.parametrize("fails", ["after forward", "after backward", "after the optimizer"])
@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_step_that_fails_leaves_no_trace(fails, failing_step):
    model, optimizer = make(streamed=True)
    expected, plain_optimizer = make(streamed=False)
    noted, expected_losses = [], []
    step = make_step(model, optimizer, noted)
    plain_step = make_step(expected, plain_optimizer, expected_losses)
    for number, batch in enumerate(batches(4)):
        if number == failing_step:
            with pytest.raises(Interrupted):
                step(batch * 2, fails=fails)
        step(batch)
        plain_step(batch)
    assert noted == expected_losses, "of the step that failed no closure ran"
    mine, plain = model.state_dict(), expected.state_dict()
    assert all(torch.equal(mine[name], plain[name]) for name in plain)


def test_updates_before_a_second_forward_stay_if_the_step_fails(caplog):
    model, optimizer = make(streamed=True)
    expected, plain_optimizer = make(streamed=False)

    def update(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    @trace
    def step(batch):
        update(model, optimizer, batch)
        update(model, optimizer, batch)
        raise Interrupted

    (batch,) = batches(1)
    with pytest.raises(Interrupted):
        step(batch)
    assert "the updates before that call stay; later updates are undone" in caplog.text
    update(expected, plain_optimizer, batch)
    mine, plain = dict(model.named_parameters()), dict(expected.named_parameters())
    assert all(torch.equal(mine[name], plain[name]) for name in plain)
