"""A model with large blocks, and a known size of the process, so that budgets can be set exactly."""

import pytest
import torch
from torch import nn

from headwater.api import process_memory
from headwater.core.units import MIB
from headwater.plan import budget, machine

WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Four blocks of 8 MiB in fp32."""

    def __init__(self, inputs=12, classes=4):
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BASE = 8 * MIB
"""Memory that the plan counts for the process itself. The real one differs between processes."""


@pytest.fixture
def known_base(monkeypatch):
    monkeypatch.setattr(budget, "resident_bytes", lambda: BASE)
    monkeypatch.setattr(budget, "LATE_BYTES", 0)
    # This base does not include the model's weights. Models of earlier tests, which were planned with another
    # base, may still exist.
    monkeypatch.setattr(machine, "private_resident_bytes", lambda ranges: 0)
    monkeypatch.setattr(process_memory, "compiled_models", list)


BATCH = 8


def points(step):
    """Return `BATCH` random points and their labels."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 12, generator=generator), torch.randint(0, 4, (BATCH,), generator=generator)
