"""FlexAttention in the dry run of a GPU, and its refusal on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from headwater.core.precision import Precision
from headwater.plan.trace import trace_step

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")

HEADS, LENGTH, WIDTH = 4, 16, 8


def causal(batch, head, query, key):
    return query >= key


class Attention(nn.Module):
    """Attention with grouped queries, a causal mask, and a bias for each head."""

    def __init__(self, *, compiled):
        super().__init__()
        self.inputs = nn.Linear(HEADS * WIDTH, 2 * HEADS * WIDTH)
        self.outputs = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.attend = torch.compile(flex.flex_attention) if compiled else flex.flex_attention

    def forward(self, x, bias):
        parts = self.inputs(x).split([HEADS * WIDTH, HEADS * WIDTH // 2, HEADS * WIDTH // 2], -1)
        query, key, value = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in parts)
        mask = flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device=x.device)

        def biased(score, batch, head, query, key):
            return score + bias[head]

        found = self.attend(query, key, value, score_mod=biased, block_mask=mask, enable_gqa=True)
        return self.outputs(found.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Layers of attention with one learned bias, which only the function for scores reads."""

    def __init__(self, *, compiled):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS))
        self.layers = nn.ModuleList(Attention(compiled=compiled) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.bias)
        return x


def mean(model, x):
    return model(x).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_plan_of_a_gpu_knows_flex_attention_and_the_weights_that_its_functions_read(compiled, precision):
    model = Net(compiled=compiled)
    x = torch.randn(2, LENGTH, HEADS * WIDTH)
    before = flex.flex_attention_hop
    trace = trace_step(model, x, Precision(precision), loss_function=mean, device="cuda")
    products = 2 * x.numel() * 3 * HEADS * WIDTH
    scores = 2 * 2 * 2 * HEADS * LENGTH * LENGTH * WIDTH
    assert [cost.forward.flops for cost in trace.costs][1:] == [products + scores] * 2
    assert trace.uses == (1, 0, 1, 2, 0, 2)
    assert flex.flex_attention_hop is before


def test_on_a_cpu_flex_attention_says_that_it_has_no_backward():
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        trace_step(Net(compiled=False), torch.randn(2, LENGTH, HEADS * WIDTH), loss_function=mean)
