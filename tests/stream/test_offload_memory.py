"""Offloaded activations use no more memory than the plan predicts."""

import pytest
from process_memory import outputs_of

pytestmark = pytest.mark.real_start

DEPTH = 24
SCRIPT = """
import json, sys, time
from pathlib import Path
from torch import nn
from headwater.plan.options import Fixed
from headwater.plan.types import Activations, Resources
from headwater.stream import offload
from planned_memory import measure

class SlowFile(offload.BlockFile):
    def write(self, offset, data):
        time.sleep(0.01)  # so that activations queue up
        super().write(offset, data)

offload.BlockFile = SlowFile

def layers(depth, width):
    for _ in range(depth):
        yield nn.Sequential(nn.Linear(width, width), nn.GELU())
    yield nn.Sequential(nn.Linear(width, 1), nn.Flatten(0))

found = measure(
    layers, depth=int(sys.argv[1]), width=128, rows=16384,  # 8 MiB for each activation
    resources=Resources(host_memory=1 << 31, disk=Path(sys.argv[2]), disk_bytes=1 << 31),
    fixed=Fixed(activations=Activations.OFFLOAD, gradient_tier="disk"),
)
print(json.dumps(found))
"""


def test_offloaded_activations_stay_within_the_plan(tmp_path):
    [found] = outputs_of(SCRIPT, DEPTH, tmp_path, mmap_threshold=1 << 22)
    kept = 2 * DEPTH * found["input"]
    assert found["predicted"] / 2 < found["rise"] <= found["predicted"] < kept, found
