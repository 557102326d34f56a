"""Streaming on a GPU computes the bits of plain PyTorch on the GPU, whose optimizer runs in host memory.

Without a GPU a few of these tests run on the CPU. `HEADWATER_TEST_CUDA=1 pytest tests/stream/test_gpu.py`
runs all of them.
"""

import dataclasses
import functools
import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
from harness import SEED, History, Job, Setting, assert_equal, collect, make_plan, token_batch
from torch import nn

import headwater
from headwater.core.arithmetic import exact_arithmetic
from headwater.core.precision import Precision
from headwater.core.seeding import derive_seed
from headwater.stream.engine import Engine

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BF16 = Precision("bf16")
SETTINGS = [
    Setting(tier, slabs, activations)
    for tier, slabs, activations in itertools.product(
        ("memory", "disk"), (2, 99), ("keep", "recompute", "offload")
    )
]
SETTINGS = SETTINGS if ON_GPU else SETTINGS[:1]

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs CUDA")


class Gpt(nn.Module):
    """A small GPT of torch's layers, since a machine with a GPU may lack the transformers library."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(96, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def job_of(micro_batches):
    batch = functools.partial(token_batch, vocabulary=96, shape=(4, 64))
    # The norms of a GPU have other bits than those of the host.
    return Job(Gpt, batch, loss_of, max_norm=None, micro_batches=micro_batches)


def arithmetic():
    return exact_arithmetic() if ON_GPU else nullcontext()


@functools.cache
def plain(micro_batches):
    """Train on the device in plain PyTorch, with the optimizer in host memory."""
    job = job_of(micro_batches)
    model, history = job.model().to(DEVICE), History()
    masters = {name: nn.Parameter(param.detach().cpu().clone()) for name, param in model.named_parameters()}
    optimizer = job.optimizer.build(job.optimizer.groups(masters.items()))
    for step in range(2):
        total = 0.0
        for index, batch in enumerate(job.batches(step)):
            torch.manual_seed(derive_seed(SEED, "micro_batch", step, index))
            with arithmetic():
                loss = job.loss(model, batch.to(DEVICE))
                total += loss.item()
                (loss / micro_batches if micro_batches > 1 else loss).backward()
        optimizer.param_groups[0]["lr"] = job.optimizer.kwargs["lr"] / (step + 1)
        for name, param in model.named_parameters():
            masters[name].grad = param.grad.cpu()
        optimizer.step()
        for name, param in model.named_parameters():
            param.data.copy_(masters[name])
            param.grad = None
        history.losses.append(total / micro_batches)
    history.weights = {name: value.detach() for name, value in masters.items()}
    return history


def streamed(setting, folder, micro_batches=1):
    job = job_of(micro_batches)
    model, history = job.model(), History()
    plan = dataclasses.replace(make_plan(job, model, setting, folder), device=DEVICE)
    with Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss) as engine:
        for step in range(2):
            history.losses.append(engine.train_step(job.batches(step), job.update(step)).loss)
        collect(engine, history)
    history.buffers = {}
    return history


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_setting_on_the_gpu_equals_plain_pytorch_on_the_gpu(setting, tmp_path):
    assert_equal(streamed(setting, tmp_path), plain(1))


@pytest.mark.parametrize("setting", SETTINGS[::4], ids=str)
def test_micro_batches_on_the_gpu_equal_plain_pytorch_on_the_gpu(setting, tmp_path):
    assert_equal(streamed(setting, tmp_path, micro_batches=3), plain(3))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_setting_in_bf16_has_the_same_bits_on_the_gpu(setting, tmp_path):
    first = dataclasses.replace(SETTINGS[0], precision=BF16)
    here = dataclasses.replace(setting, precision=BF16)
    assert_equal(streamed(here, tmp_path / "other"), streamed(first, tmp_path / "first"))


@needs_gpu
def test_memory_of_the_gpu_is_free_after_an_engine(tmp_path):
    streamed(SETTINGS[0], tmp_path)
    # The garbage of earlier tests. Otherwise a collection in the next run might free it.
    gc.collect()
    before = torch.cuda.memory_allocated()
    streamed(SETTINGS[0], tmp_path)
    assert torch.cuda.memory_allocated() == before


def trained_by_hand(streams):
    """Return averages of weights, after steps of a loop with its own SGD and noise on gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(DEVICE)
    x = torch.ones(4, 16, device=DEVICE)
    average = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    if streams:
        headwater.compile(model, "CSX")
    with arithmetic():
        for _ in range(2):
            model(x).square().mean().backward()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    assert param.grad.device == param.device == param.detach().device == x.device
                    param.grad.add_(torch.full_like(param, 0.01))
                    param.data.add_(param.grad, alpha=-0.1)
                    average[name].lerp_(param.detach(), 0.5)
                    param.grad = None
    return {name: value.cpu() for name, value in average.items()}


def test_a_users_loop_computes_with_parameters_and_gradients_on_the_device():
    wanted, found = trained_by_hand(streams=False), trained_by_hand(streams=True)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
