"""Run a user's script in plain PyTorch and on streamed weights, and compare the results bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwater as cstorch

PLANS = {
    "memory": {},
    "slabs": {"tier": "memory", "num_slabs": 2},
    "disk": {"tier": "disk", "num_slabs": 2},
    "gradients on disk": {"tier": "disk", "gradient_tier": "disk", "num_slabs": 2},
    "recompute": {"tier": "memory", "num_slabs": 2, "activations": "recompute"},
}
"""Name of a plan -> the options of the backend that ask for it."""

every_plan = pytest.mark.parametrize("plan", [*PLANS])
extreme_plans = pytest.mark.parametrize("plan", ["memory", "gradients on disk", "recompute"])
PLANS["recompute on disk"] = {
    "tier": "disk",
    "gradient_tier": "disk",
    "num_slabs": 2,
    "activations": "recompute",
}
odd_plans = pytest.mark.parametrize("plan", ["memory", "slabs", "recompute on disk"])
some_plan = pytest.mark.parametrize("plan", ["memory", "disk"])


@dataclasses.dataclass
class Place:
    """The place where a script runs: plain PyTorch, or streaming with one of the plans.

    Attributes:
        plan: name of a plan; `None` for plain PyTorch.
        folder: the folder to which the script or its backend writes.
    """

    plan: str | None
    folder: Path
    _compiled: list[nn.Module] = dataclasses.field(default_factory=list)

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model, compiled for streaming unless the script runs in plain PyTorch."""
        if self.plan is None:
            return model
        self._compiled.append(model)
        return cstorch.compile(model, self.backend())

    def backend(self) -> Any:
        options = dict(PLANS[self.plan])
        if options.get("tier") == "disk":
            options["disk"] = self.folder
        return cstorch.backend("CSX", **options)

    def trace(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step, traced unless the script runs in plain PyTorch."""
        return step if self.plan is None else cstorch.trace(step)

    def release(self) -> None:
        """Release every compiled model, so that it is a plain model again."""
        for model in self._compiled:
            cstorch.release(model)


Script = Callable[[Place], Any]
"""Trains in some way, and returns whatever it has to show."""


def check(script: Script, plan: str, folder: Path) -> Any:
    """Assert that a script returns the same on streamed weights as in plain PyTorch; return that result."""
    expected = _run(script, Place(None, folder / "plain"))
    given = _run(script, Place(plan, folder / "streamed"))
    assert_equal(given, expected)
    return expected


def _run(script: Script, place: Place) -> Any:
    place.folder.mkdir()
    torch.manual_seed(0)
    try:
        return _settled(script(place))
    finally:
        place.release()


def _settled(value: Any) -> Any:
    """Replace models by their state and tensors by copies."""
    if isinstance(value, nn.Module):
        return _settled(value.state_dict())
    if isinstance(value, torch.optim.Optimizer):
        return _settled(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).clone()
    if isinstance(value, Mapping):
        return {key: _settled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_settled(item) for item in value]
    return value


def assert_equal(given: Any, expected: Any, where: str = "") -> None:
    """Assert that two nested results are equal: tensors bit for bit, other values by ==."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(given, torch.Tensor), f"{where}: {given!r} is no tensor"
        assert given.dtype == expected.dtype and given.shape == expected.shape, where
        assert torch.equal(given, expected), f"{where}: off by {(given - expected).abs().max()}"
    elif isinstance(expected, Mapping):
        assert given.keys() == expected.keys(), f"{where}: {list(given)} != {list(expected)}"
        for key in expected:
            assert_equal(given[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(given) == len(expected), f"{where}: {len(given)} != {len(expected)} items"
        for index, item in enumerate(expected):
            assert_equal(given[index], item, f"{where}[{index}]")
    else:
        assert given == expected, f"{where}: {given!r} != {expected!r}"


class Net(nn.Module):
    """A small model of several stages, with a buffer that changes and randomness."""

    def __init__(self, width: int = 12, classes: int = 5, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch, seq] to logits [batch, classes]."""
        if self.training:
            self.calls += 1
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + self.dropout(block(hidden))
        return self.head(self.norm(hidden).mean(1))


def batches(count: int, size: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of tokens [size, 6] and classes [size]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(17, (size, 6), generator=generator), torch.randint(5, (size,), generator=generator))
        for _ in range(count)
    ]


def train(
    model: nn.Module,
    call: Callable[[int], torch.Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
) -> list[Any]:
    """Take optimizer steps, each for the loss `call(number)`; return losses, model and optimizer."""
    optimizer = optimizer or adamw(model.parameters())
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = call(number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, model, optimizer]


def randn(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers that depend only on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


loss_of = nn.functional.cross_entropy


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return an AdamW that uses the same fused kernel as the engine."""
    return torch.optim.AdamW(params, **{"lr": 0.01, "fused": True, **options})
