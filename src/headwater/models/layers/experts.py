"""Mixture of experts: a router sends each token to a few feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from headwater.config.models.common import Nonlinearity
from headwater.models.layers.feed_forward import GATED, NONLINEARITIES, FeedForward
from headwater.models.layers.linear import Linear
from headwater.models.layers.replaced import Multiply


class StackedLinear(nn.Module):
    """One linear layer per expert; their weights are stacked: [experts · outputs, inputs].

    Args:
        num_experts: number of experts.
        inputs: input width of an expert.
        outputs: output width of an expert.
        bias: add a bias.

    Attributes:
        multiply: computes the products; see `models/few_rows.py`.
    """

    multiply: Multiply = staticmethod(F.linear)

    def __init__(self, num_experts: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts * outputs, inputs))
        self.bias = nn.Parameter(torch.empty(num_experts * outputs)) if bias else None

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Apply each expert's layer to the tokens of that expert: [tokens, inputs] -> [tokens, outputs]."""
        weights = self.weight.chunk(self.num_experts)
        biases = [None] * self.num_experts if self.bias is None else self.bias.chunk(self.num_experts)
        return [self.multiply(*three) for three in zip(parts, weights, biases, strict=True)]


class MixtureOfExperts(nn.Module):
    """A feed-forward layer with several experts: [..., hidden] -> [..., hidden].

    A router assigns a probability to each expert. The output of a token is the mean of the outputs of its
    `top_k` most probable experts, weighted by their probabilities (arXiv:2401.04088, section 2.1). With
    `top_k` 1 it is the output of the expert times its probability (arXiv:2101.03961, equation 2).

    Args:
        hidden_size: width of input and output.
        filter_size: inner width of an expert.
        nonlinearity: nonlinearity of the experts.
        num_experts: number of experts to choose from.
        top_k: experts per token.
        num_shared_experts: number of additional experts that every token uses.
        null_expert_bias: with `top_k` 1: logit of an additional expert whose output is 0.
        bias: add a bias to every layer of the experts.
        dropout: dropout rate of the output.
    """

    def __init__(
        self,
        hidden_size: int,
        filter_size: int,
        nonlinearity: Nonlinearity,
        *,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        null_expert_bias: float | None = None,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.null_expert_bias = null_expert_bias
        self.nonlinearity = NONLINEARITIES[nonlinearity]
        self.router = Linear(hidden_size, num_experts, bias=False)
        self.input = StackedLinear(num_experts, hidden_size, filter_size, bias=bias)
        gated = nonlinearity in GATED
        self.gate = StackedLinear(num_experts, hidden_size, filter_size, bias=bias) if gated else None
        self.output = StackedLinear(num_experts, filter_size, hidden_size, bias=bias)
        self.shared = None
        if num_shared_experts:
            width = num_shared_experts * filter_size
            self.shared = FeedForward(hidden_size, width, nonlinearity, bias=bias, dropout=0.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [..., hidden], and the load-balancing loss, a scalar.

        The loss is `experts · Σ fᵢ·Pᵢ`, where `fᵢ` is the fraction of the choices that fall on expert i and
        `Pᵢ` its mean probability (arXiv:2101.03961, equations 4 to 6). It is 1 if all experts are used
        equally.
        """
        tokens = x.flatten(0, -2)
        probabilities = self._probabilities(tokens)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        choices = F.one_hot(chosen, self.num_experts).sum(dim=(0, 1))
        given = self._run_experts(tokens, chosen, choices)
        output = (given * weights.to(given.dtype).unsqueeze(-1)).sum(1)
        if self.shared is not None:
            output = output + self.shared(tokens)
        shares = choices / chosen.numel()
        balance = self.num_experts * (shares * probabilities.mean(0)).sum()
        return self.dropout(output.view_as(x)), balance

    def _probabilities(self, tokens: Tensor) -> Tensor:
        """Return the probability of each expert for each token, fp32 [tokens, experts]."""
        # Without autocast: in 16 bits, rounding could change the choice of experts.
        with torch.autocast(tokens.device.type, enabled=False):
            logits = self.router(tokens.to(self.router.weight.dtype)).float()
        if self.null_expert_bias is None:
            return F.softmax(logits, dim=-1)
        null = logits.new_full((len(logits), 1), self.null_expert_bias)
        probabilities: Tensor = torch.cat((logits, null), dim=-1).softmax(-1)
        return probabilities.narrow(-1, 0, self.num_experts)

    def _run_experts(self, tokens: Tensor, chosen: Tensor, choices: Tensor) -> Tensor:
        """Return the outputs of the chosen experts for each token, [tokens, top_k, hidden]."""
        order = chosen.flatten().argsort(stable=True)
        parts = tokens[order // self.top_k].split(_sizes(choices, len(order)))
        inner = self.input(parts)
        if self.gate is None:
            inner = [self.nonlinearity(part) for part in inner]
        else:
            gates = self.gate(parts)
            inner = [self.nonlinearity(gate) * part for gate, part in zip(gates, inner, strict=True)]
        given: Tensor = torch.cat(self.output(inner))[order.argsort()]
        return given.view(*chosen.shape, -1)


def _sizes(choices: Tensor, total: int) -> list[int]:
    """Return how many tokens each expert gets. In a dry run these are unknown, and about equal numbers."""
    if choices.is_meta or isinstance(choices, FakeTensor):
        even, more = divmod(total, len(choices))
        return [even + (expert < more) for expert in range(len(choices))]
    sizes: list[int] = choices.tolist()
    return sizes
