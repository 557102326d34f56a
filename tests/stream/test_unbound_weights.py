"""A weight that is read while it is not on the device is an error that names its place, never a number."""

import pytest
import torch
from harness import Job, Setting, make_engine, regression, token_batch
from odd_models import WIDTH, ForeignRead, linears
from torch import nn

from headwater.core.errors import NonFiniteError, UnboundWeightError

SETTINGS = [Setting("memory", 2), Setting("disk", 2), Setting("memory", 2, "recompute")]


class LateReader(nn.Module):
    """Reads a weight in a place where the dry run did not see it read, once it is told to."""

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


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_read_in_a_place_that_the_dry_run_did_not_see(setting, tmp_path):
    job = regression(LateReader, 4, WIDTH)
    with make_engine(job, setting, tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        engine.model.late = True
        with pytest.raises((NonFiniteError, UnboundWeightError), match=r"blocks\.1"):
            engine.train_step(job.batches(1), job.update(1))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_read_outside_of_every_forward(setting, tmp_path):
    def loss(model, x):
        return model(x).square().mean() + model[1].weight.square().sum()

    plain = regression(lambda: nn.Sequential(*linears(4)), 4, WIDTH)
    job = Job(plain.make_model, plain.make_batch, loss)
    with (
        pytest.raises((NonFiniteError, UnboundWeightError)),
        make_engine(job, setting, tmp_path) as engine,
    ):
        engine.train_step(job.batches(0), job.update(0))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_read_after_the_module_is_done(setting, tmp_path):
    job = Job(ForeignRead, token_batch, lambda model, batch: model(batch).mean())
    with make_engine(job, setting, tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        for name, param in engine.model.named_parameters():
            assert param.isnan().all(), name
            assert param.untyped_storage().nbytes() <= 8, name


def test_a_method_beside_the_forward(tmp_path):
    class TwoDoors(nn.Module):
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

    seen = regression(TwoDoors, 4, WIDTH)
    unseen = Job(TwoDoors, seen.make_batch, lambda model, x: model.encode(x).mean())
    with make_engine(seen, Setting("memory", 2), tmp_path) as engine:
        engine._loss_function = unseen.loss
        with pytest.raises((NonFiniteError, UnboundWeightError)):
            engine.train_step(seen.batches(0), seen.update(0))


def test_shape_and_dtype_of_an_unbound_weight_are_right(tmp_path):
    job = regression(lambda: nn.Sequential(*linears(3)), 4, WIDTH)
    with make_engine(job, Setting("disk", 2), tmp_path) as engine:
        assert {p.shape for p in engine.model.parameters()} == {(WIDTH, WIDTH), (WIDTH,)}
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert all(p.requires_grad for p in engine.model.parameters())
