"""Compiled blocks train like those that are not compiled, and in one way."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from harness import (
    Job,
    Setting,
    assert_equal,
    make_engine,
    regression,
    token_batch,
    train_plain,
    train_streamed,
)
from torch import nn
from torch.nn import functional as F

from headwater.core.errors import ModelError
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.compilation import MOST_VARIANTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]

BF16 = Precision("bf16")
WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Four blocks between an embedding and a head with the same weight. A bias in each block is frozen."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
            block.down.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


# SGD, because AdamW would turn the rounding of small gradients into large differences.
JOB = Job(Decoder, functools.partial(token_batch), loss, OptimizerSpec("SGD", {"lr": 0.5}), micro_batches=2)

SETTINGS = {
    "memory, read in place": Setting(in_place=True),
    "memory, read in place, recomputed": Setting(in_place=True, activations="recompute"),
    "memory, two slabs": Setting(slabs=2),
    "disk, recomputed": Setting(tier="disk", slabs=2, activations="recompute"),
    "disk": Setting(tier="disk", slabs=3),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def train(setting, folder, *, compiled=True):
    folder.mkdir()
    return train_streamed(JOB, dataclasses.replace(setting, compiled=compiled), folder, steps=2)


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_compiled_blocks_are_close_to_plain_pytorch_and_have_the_same_bits_twice(
    setting, precision, tmp_path
):
    setting = dataclasses.replace(setting, precision=precision)
    first = train(setting, tmp_path / "first")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # all blocks share it
    torch._dynamo.reset()
    assert_equal(train(setting, tmp_path / "second"), first)
    plain = train_plain(JOB, steps=2, precision=precision)
    relative = 2e-2 if precision.mixed else 1e-5
    assert first.losses == pytest.approx(plain.losses, rel=relative)
    assert first.norms == pytest.approx(plain.norms, rel=relative)
    for name, weight in plain.weights.items():
        assert torch.allclose(first.weights[name], weight, rtol=0, atol=relative), name
        if "up.weight" in name or "down.bias" in name:
            assert torch.equal(first.weights[name], weight), name


@pytest.mark.parametrize("setting", [Setting(in_place=True), Setting(slabs=2)], ids=str)
def test_a_block_whose_input_needs_no_gradient_is_compiled_apart(setting, tmp_path):
    job = regression(lambda: nn.Sequential(*(Block() for _ in range(4))), 8, WIDTH)
    setting = dataclasses.replace(setting, precision=BF16)
    compiled = train_streamed(job, dataclasses.replace(setting, compiled=True), tmp_path, steps=2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    eager = train_streamed(job, setting, tmp_path, steps=2)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2)


class Scaled(Block):
    """A block with a constant, which the compiler puts into the code."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * super().forward(x)


def test_blocks_with_three_constants_need_seven_variants_in_training_and_evaluation(tmp_path):
    """One more constant would exceed the limit of torch; see `most_variants` of `compile: auto`."""
    job = regression(lambda: nn.Sequential(*(Scaled(1 + index % 3) for index in range(6))), 8, WIDTH)
    with make_engine(job, Setting(in_place=True, precision=BF16, compiled=True), tmp_path) as engine:
        for step in range(2):
            engine.train_step(job.batches(step), job.update(step))
            engine.model.eval()
            engine.evaluate(job.make_batch(0, 0))
            engine.model.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 7
    assert torch._dynamo.config.recompile_limit == MOST_VARIANTS


def test_the_forwards_of_a_released_model_are_its_own(tmp_path):
    setting = Setting(in_place=True, activations="recompute", compiled=True)
    engine = make_engine(JOB, setting, tmp_path)
    block = engine.model.blocks[0]
    assert "forward" in vars(block)
    engine.close()
    assert "forward" not in vars(block)


@pytest.fixture
def inductor():
    """Return the compiler, without its caches."""
    from torch._functorch import config as functorch  # here, because an import of the compiler warns
    from torch._inductor import compile_fx

    off = {"fx_graph_cache": False}
    with compile_fx.config.patch(off), functorch.patch(enable_autograd_cache=False):
        yield compile_fx


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_block_that_cannot_be_compiled_is_named(direction, tmp_path, monkeypatch, inductor):
    compile_one = inductor.fx_codegen_and_compile

    def failing(*args, **kwargs):
        if kwargs["is_backward"] == (direction == "backward"):
            # torch's compiler raises this error for operators that it cannot translate.
            raise NotImplementedError(f"no code for this {direction}")
        return compile_one(*args, **kwargs)

    monkeypatch.setattr(inductor, "fx_codegen_and_compile", failing)
    with (
        make_engine(JOB, Setting(in_place=True, compiled=True), tmp_path) as engine,
        pytest.raises(ModelError, match=f"no code for this {direction}") as raised,
    ):
        engine.train_step(JOB.batches(0), JOB.update(0))
    assert raised.value.where == "blocks.0"
    assert "compile: false" in raised.value.remedy


def test_an_error_without_a_compiler_has_a_remedy(tmp_path, inductor):
    with (
        inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        make_engine(JOB, Setting(in_place=True, compiled=True), tmp_path) as engine,
        pytest.raises(ModelError, match=r"torch.compile cannot compile this module.*[Cc]ompiler") as raised,
    ):
        engine.train_step(JOB.batches(0), JOB.update(0))
    assert "needs a C++ compiler" in raised.value.remedy
