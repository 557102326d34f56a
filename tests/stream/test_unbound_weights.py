"""A weight that is read while it is not on the device is read from the store, with its right values."""

import dataclasses

import pytest
import torch
from harness import (
    Job,
    Setting,
    check,
    make_engine,
    regression,
    token_batch,
)
from odd_models import WIDTH, ForeignRead, linears
from torch import nn

from headwater.core.errors import StreamError

SETTINGS = [Setting("memory", 2), Setting("disk", 2), Setting("memory", 2, "recompute")]


class LateReader(nn.Module):
    """A model that, when told to, reads a weight at a place where the dry run did not see it read."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, other=None):
            x = self.own(x)
            return x if other is None else x @ other.own.weight

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.late = False

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x, self.blocks[3] if self.late and index == 1 else None)
        return x


class LateStack(LateReader):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.late = self.calls > 3  # the dry run is one of the calls
        return super().forward(x)


def with_penalty(model, x):
    return model(x).square().mean() + model[1].weight.square().sum()


class TwoDoors(nn.Module):
    """A model whose forward the dry run sees, while the loss calls another method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(linears(3))

    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x @ self.weight


def stack(loss=None):
    plain = regression(lambda: nn.Sequential(*linears(4)), 4, WIDTH)
    return plain if loss is None else Job(plain.make_model, plain.make_batch, loss)


JOBS = {
    "late": lambda: regression(LateStack, 4, WIDTH),
    "penalty": lambda: stack(with_penalty),
    "after the module": lambda: Job(ForeignRead, token_batch, lambda model, batch: model(batch).mean()),
    "beside the forward": lambda: Job(
        TwoDoors, regression(TwoDoors, 4, WIDTH).make_batch, lambda model, x: model.encode(x).square().mean()
    ),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_a_weight_may_be_read_in_any_module(name, setting, tmp_path):
    if name == "late":  # its counter differs where a forward runs twice
        setting = dataclasses.replace(setting, activations="keep")
    check(JOBS[name](), setting, tmp_path, steps=6)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_parameters_are_read_and_written_between_steps(setting, tmp_path):
    with make_engine(stack(), setting, tmp_path) as engine:
        job = stack()
        engine.train_step(job.batches(0), job.update(0))
        masters = dict(engine.named_masters())
        for name, param in engine.model.named_parameters():
            assert torch.equal(param.detach(), masters[name])
            assert torch.equal(param.data, masters[name])
            assert param.detach().norm() == masters[name].norm()
            assert f"{name}," in repr(param)
        with torch.no_grad():
            engine.model[1].weight.mul_(2.0)
            nn.init.zeros_(engine.model[0].weight)
            engine.model[2].bias[1] = 7.0
            engine.model[3].bias.data = torch.ones(WIDTH)
        after = dict(engine.named_masters())
        assert torch.equal(after["1.weight"], masters["1.weight"] * 2)
        assert not after["0.weight"].any()
        assert after["2.bias"][1] == 7.0
        assert torch.equal(after["2.bias"][2:], masters["2.bias"][2:])
        assert after["3.bias"].eq(1).all()
        own = nn.Sequential(*linears(4))
        own.load_state_dict(after)
        x = torch.randn(3, WIDTH)
        with engine.inference():
            assert torch.equal(engine.model(x), own(x))


def test_unsupported_uses_of_a_streamed_parameter_are_refused(tmp_path):
    with make_engine(stack(), SETTINGS[0], tmp_path) as engine:
        with pytest.raises(StreamError, match="state_dict"):
            torch.save(engine.model[0].weight, tmp_path / "weight.pt")
        with pytest.raises(StreamError, match="no_grad"):
            engine.model[0].weight.add_(1.0)


def test_shape_and_dtype_of_an_unbound_weight_are_right(tmp_path):
    job = regression(lambda: nn.Sequential(*linears(3)), 4, WIDTH)
    with make_engine(job, Setting("disk", 2), tmp_path) as engine:
        assert {p.shape for p in engine.model.parameters()} == {(WIDTH, WIDTH), (WIDTH,)}
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert all(p.requires_grad for p in engine.model.parameters())
