"""One training loop in plain PyTorch on the CPU, and with streamed weights. On a CPU the losses are equal."""

from typing import Any

import torch
from torch import nn

import headwater as hw


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


def train(backend: Any) -> list[float]:
    """Train for ten steps and return the losses. Without a backend this is plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(6)), nn.Linear(64, 10))
    if backend is not None:
        model = hw.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = "cpu" if backend is None else backend.torch_device
    losses = []
    for _ in range(10):
        inputs = torch.randn(32, 64).to(device)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


plain = train(None)
streamed = train(hw.backend("CSX", num_slabs=2))  # two blocks at a time on the device
for step, (first, second) in enumerate(zip(plain, streamed, strict=True), 1):
    print(step, first, second, "equal" if first == second else "different")
