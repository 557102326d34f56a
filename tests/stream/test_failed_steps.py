"""A step commits or leaves no trace, and its error names the place of the failure."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import (
    History,
    Job,
    Setting,
    assert_equal,
    check,
    collect,
    make_engine,
    regression,
    token_batch,
    train_plain,
    train_streamed,
)
from odd_models import WIDTH, linears
from torch import nn

from headwater.core.errors import CorruptError, DiskFullError, NonFiniteError, StoreError, StreamError
from headwater.core.precision import Precision
from headwater.core.units import KIB

SETTINGS = [
    Setting(in_place=True),
    Setting("memory", 2),
    Setting("memory", 99, "recompute"),
    Setting("disk", 2, "recompute", "disk"),
]


class Fault(nn.Module):
    """A layer that returns its input, until the test makes it fail."""

    class _Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fault):
            ctx.fault = fault
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            if ctx.fault.kind == "raise in backward":
                raise ZeroDivisionError("in backward")
            factor = float("nan") if ctx.fault.kind == "nan in backward" else 1.0
            return gradient * factor, None

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""

    def forward(self, x):
        if self.kind == "raise in forward":
            raise ZeroDivisionError("in forward")
        if self.kind == "inf in forward":
            x = x / 0
        return self._Backward.apply(x, self)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linears(1)[0]
        self.fault = Fault()

    def forward(self, x):
        return self.fault(self.linear(x)).tanh()


def make_job(**options) -> Job:
    return regression(lambda: nn.Sequential(*(Block() for _ in range(5))), 4, WIDTH, **options)


def train_with_fault(
    setting: Setting, folder: Path, kind: str, error: type[Exception], *, job: Job | None = None
) -> tuple[History, Exception]:
    """Train four steps, with a failing step before the third."""
    job = job or make_job(micro_batches=2)
    history = History()
    with make_engine(job, setting, folder) as engine:
        for step in range(4):
            if step == 2:
                engine.model[2].fault.kind = kind
                seen = raised(error, lambda: engine.train_step(job.batches(17), job.update(17)))
                engine.model[2].fault.kind = ""
            report = engine.train_step(job.batches(step), job.update(step))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    return history, seen


def raised(error: type[Exception], call: Callable[[], object]) -> Exception:
    """Return the error that `call` raises, without the frames that would keep the step's tensors alive."""
    with pytest.raises(error) as caught:
        call()
    return caught.value.with_traceback(None)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("raise in forward", ZeroDivisionError),
        ("raise in backward", ZeroDivisionError),
        ("inf in forward", NonFiniteError),
        ("nan in backward", NonFiniteError),
    ],
)
def test_a_failed_step_leaves_no_trace(kind, error, setting, tmp_path):
    expected = train_streamed(make_job(micro_batches=2), setting, tmp_path, steps=4)
    history, _ = train_with_fault(setting, tmp_path, kind, error)
    assert_equal(history, expected)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_non_finite_loss_names_step_and_first_stage(setting, tmp_path):
    job = regression(lambda: nn.Sequential(*(Block() for _ in range(5))), 4, WIDTH)
    with make_engine(job, setting, tmp_path) as engine:
        with torch.no_grad():
            engine.store.parameters.write(3, lambda piece: piece.master.fill_(float("inf")))
        with pytest.raises(NonFiniteError) as caught:
            engine.train_step(job.batches(0), job.update(31))
    assert "step 31" in str(caught.value)
    assert "'3', the first" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_non_finite_gradient_names_step_and_first_stage(setting, tmp_path):
    _, error = train_with_fault(setting, tmp_path, "nan in backward", NonFiniteError)
    assert "gradient of step 17" in str(error)
    assert "'2', the first" in str(error)


@pytest.mark.parametrize("kind", ["inf in forward", "nan in backward"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_non_finite_step_can_be_skipped(kind, setting, tmp_path):
    job = make_job()
    expected = train_streamed(job, setting, tmp_path, steps=3)
    with make_engine(job, setting, tmp_path) as engine:
        history = History()
        for step in range(3):
            engine.model[1].fault.kind = kind
            skipped = engine.train_step(job.batches(40 + step), job.update(40 + step, skip_non_finite=True))
            assert not skipped.applied
            engine.model[1].fault.kind = ""
            report = engine.train_step(job.batches(step), job.update(step, skip_non_finite=True))
            assert report.applied
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        assert_equal(collect(engine, history), expected)


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder in which no file may be larger than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, before[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_refused_at_the_start(small_disk):
    job = regression(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), 4, 256)
    with pytest.raises(DiskFullError, match=r"stage_\d+.bin") as caught:
        make_engine(job, Setting("disk"), small_disk)
    assert str(small_disk) in str(caught.value)
    assert "larger disk" in str(caught.value)


def test_a_full_disk_for_gradients_raises(small_disk, monkeypatch):
    real = os.pwrite

    def full(fd, buffers, offset):
        if fd not in weights:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    job = make_job()
    with make_engine(job, Setting("disk", 2, gradient_tier="disk"), small_disk) as engine:
        weights = {file._fd for file in engine.store.tier._files}
        monkeypatch.setattr("os.pwrite", full)
        with pytest.raises(DiskFullError, match=r"gradient_\d+.bin"):
            engine.train_step(job.batches(0), job.update(0))


def test_truncated_stage_file(tmp_path):
    job = make_job()
    with make_engine(job, Setting("disk", 2), tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        os.ftruncate(engine.store.tier._files[3]._fd, 100)
        with pytest.raises(CorruptError, match="could read only") as caught:
            engine.train_step(job.batches(1), job.update(1))
        assert "stage_0003.bin" in str(caught.value)
        assert "checkpoint" in str(caught.value)


def test_weights_of_a_failed_update_cannot_be_read(tmp_path, monkeypatch):
    job = make_job()
    with make_engine(job, Setting("disk", 2), tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))

        def fail(*args):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("os.preadv", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                engine.train_step(job.batches(1), job.update(1))
        with pytest.raises(StoreError, match="halfway"):
            dict(engine.named_masters())


FOLLOWED = [Setting("memory", 2), Setting("disk", 2), Setting("memory", 99), Setting(in_place=True)]


@pytest.mark.parametrize("setting", FOLLOWED, ids=str)
def test_a_forward_that_writes_into_its_weights_equals_plain(setting, tmp_path):
    job = Job(renormalizing, token_batch, lambda model, tokens: (model(tokens) - 1).square().mean())
    check(job, setting, tmp_path)


def test_a_forward_that_writes_into_narrow_weights_is_refused(tmp_path):
    """Narrow weights are rounded copies of the masters, so a change of them would be lost."""
    job = Job(renormalizing, token_batch, lambda model, tokens: (model(tokens) - 1).square().mean())
    with (
        make_engine(job, Setting("memory", 2, precision=Precision("bf16")), tmp_path) as engine,
        pytest.raises(StreamError, match=r"makes 0\.weight a tensor of torch\.bfloat16"),
    ):
        engine.train_step(job.batches(0), job.update(0))


def renormalizing() -> nn.Module:
    return nn.Sequential(nn.Embedding(96, WIDTH, max_norm=1.0), *linears(3))


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting(in_place=True)], ids=str)
def test_a_saved_tensor_that_changes_is_refused_as_in_plain_pytorch(setting, tmp_path):
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(linears(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).sigmoid().mul_(2)
            return x

    job = regression(Doubled, 4, WIDTH)
    with pytest.raises((RuntimeError, StreamError), match=r"in.?place"):
        train_plain(job, steps=1)
    with (
        make_engine(job, setting, tmp_path) as engine,
        pytest.raises((RuntimeError, StreamError), match=r"in.?place"),
    ):
        engine.train_step(job.batches(0), job.update(0))


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
def test_a_forward_whose_weights_cannot_be_fetched_has_ended(setting, tmp_path, monkeypatch):
    job = make_job()
    with make_engine(job, setting, tmp_path) as engine:
        (batch,) = job.batches(0)
        expected = job.loss(engine.model, batch)
        require = engine.executor._weights.require

        def failing(stage):
            if stage == 3:
                raise StoreError("the disk has failed")
            return require(stage)

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor._weights, "require", failing)
            raised(StoreError, lambda: job.loss(engine.model, batch))
        assert engine.executor.is_idle
        assert not any(parameters.is_bound for parameters in engine._binder.stages)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch.equal(job.loss(engine.model, batch), expected)


def test_a_file_in_the_place_of_the_folder_of_gradients_is_refused(tmp_path):
    place = tmp_path / "taken"
    place.write_text("a file")
    with pytest.raises(StoreError, match="because a file is there"):
        make_engine(make_job(), Setting("memory", 2, gradient_tier="disk"), place)
