"""The embedding layer is bit-identical to torch's, in any kind of memory for the gradient."""

import copy

import pytest
import torch
from torch import nn

from headwater.core import buffers
from headwater.models.layers.linear import Embedding

VOCABULARY, WIDTH = 1000, 24


@pytest.mark.parametrize("own_pages", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "index"), [((3, 70), torch.int32), ((50,), torch.int64), ((0,), torch.int64)]
)
def test_rows_and_gradient_equal_torch(own_pages, dtype, index, shape, monkeypatch):
    monkeypatch.setattr(buffers, "_OWN_PAGES_BYTES", 0 if own_pages else 1 << 40)
    torch.manual_seed(0)
    oracle = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
    ours = Embedding(VOCABULARY, WIDTH, dtype=dtype)
    ours.load_state_dict(copy.deepcopy(oracle.state_dict()))
    indices = torch.randint(0, 40, shape, dtype=index)  # many indices occur several times
    gradient = torch.randn(*shape, WIDTH, dtype=dtype)
    for layer in (oracle, ours):
        layer(indices).backward(gradient)
        layer(indices).backward(2 * gradient)  # accumulated
    assert torch.equal(ours(indices), oracle(indices))
    assert torch.equal(ours.weight.grad, oracle.weight.grad)


def test_an_index_beyond_the_table_is_an_error():
    with pytest.raises(IndexError):
        Embedding(VOCABULARY, WIDTH)(torch.tensor([VOCABULARY]))
