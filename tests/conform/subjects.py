"""Models for the tests of `headwater conform`."""

import os
import signal
import time

import torch
from torch import nn


def plain():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), [torch.randn(4, 4)]


def with_loss_and_optimizer():
    batches = [{"x": torch.randn(4, 4), "y": torch.randint(2, (4,))} for _ in range(2)]
    return (
        nn.Linear(4, 2),
        batches,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True),
    )


class ReportsItsDtype(nn.Linear):
    """A model whose loss is a number for the dtype of its output."""

    def forward(self, x):
        y = super().forward(x)
        return 0 * y.float().sum() + {torch.bfloat16: 16, torch.float16: 10, torch.float32: 23}[y.dtype]


def reports_its_dtype():
    return ReportsItsDtype(4, 2), [torch.randn(4, 4)]


class KnowsItIsStreamed(nn.Linear):
    """A model that computes a different result when it is streamed."""

    def forward(self, x):
        return super().forward(x) + 0.5 * hasattr(self, "_headwater")


def different():
    return KnowsItIsStreamed(4, 2), [torch.randn(4, 4)]


class Transforms(nn.Linear):
    """A model with a transform of torch.func in its forward, which is refused."""

    def forward(self, x):
        return super().forward(x) + torch.func.grad(lambda v: v.tanh().sum())(x)


def refused():
    return Transforms(4, 4), [torch.randn(4, 4)]


def unsteady():
    return nn.Linear(4, 2), [torch.full((2, 4), float(time.perf_counter_ns() % 1000))]


class Breaks(nn.Linear):
    """A model that raises an error of another library when it is streamed."""

    def forward(self, x):
        if hasattr(self, "_headwater"):
            raise RuntimeError("not in the mood")
        return super().forward(x)


def breaks():
    return Breaks(4, 2), [torch.randn(4, 4)]


def dropout():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [torch.randn(4, 4)]


class Killed(nn.Linear):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGSEGV)


def killed():
    return Killed(4, 2), [torch.randn(2, 4)]


def three():
    return 1, 2, 3
