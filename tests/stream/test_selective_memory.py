"""Selective recomputation uses no more memory than the plan predicts, and less than kept activations."""

import pytest
from process_memory import outputs_of

pytestmark = pytest.mark.real_start

DEPTH = 12
SCRIPT = """
import json, sys
from torch import nn
from headwater.plan.options import Fixed
from headwater.plan.types import Activations, Resources
from planned_memory import measure

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))

found = measure(
    lambda depth, width: (Block(width) for _ in range(depth)),
    depth=int(sys.argv[1]), width=128, rows=16384,  # 8 MiB for each value
    resources=Resources(), fixed=Fixed(activations=Activations.SELECTIVE, tier="memory"),
)
print(json.dumps(found))
"""


def test_planned_memory_holds_and_is_less_than_all_activations():
    [found] = outputs_of(SCRIPT, DEPTH, mmap_threshold=1 << 20)
    kept = 4 * DEPTH * found["input"]  # the values of norm and GELU, GELU's input and the residual stream
    assert 0.7 * found["predicted"] < found["rise"] <= found["predicted"] < kept, found
