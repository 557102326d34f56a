"""A dry run of the loss skips blocks, but counts the same as with all blocks."""

import pytest
import torch
from torch import nn

from headwater.core import dry_run
from headwater.core.precision import Precision
from headwater.models import loss as module
from headwater.models.loss import linear_cross_entropy
from headwater.plan.trace import trace_step


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 40, bias=False)

    def forward(self, hidden):
        rows = hidden.shape[0]
        targets = torch.zeros(rows, dtype=torch.long)
        return linear_cross_entropy(
            self.linear(hidden), self.linear.weight.t(), None, targets, torch.ones(rows) / rows
        )


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 2048], ids=["one chunk", "chunks of 8 rows"])
def test_trace_with_two_blocks_equals_the_trace_with_all(chunk_bytes, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1024)  # 4 rows of 64 columns
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    model, batch = Head(), torch.zeros(39, 8)
    few = trace_step(model, batch, Precision("fp32"))
    monkeypatch.setattr(module, "counts_costs", lambda: False)
    assert trace_step(model, batch, Precision("fp32")) == few


def test_a_dry_run_computes_the_first_and_the_last_block_of_the_first_chunk():
    assert list(module.block_starts(39, 4, first_chunk=False)) == list(range(0, 39, 4))
    with dry_run.counting_costs():
        assert list(module.block_starts(39, 4, first_chunk=True)) == [0, 36]
        assert list(module.block_starts(8, 4, first_chunk=True)) == [0, 4]
        assert list(module.block_starts(3, 4, first_chunk=True)) == [0]
        assert list(module.block_starts(39, 4, first_chunk=False)) == []
