"""Cross-attention: attention of one sequence to another."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence [batch, queries, hidden] to another [batch, keys, hidden].

    The output is [batch, queries, hidden]. One product computes keys and values; their weights are stacked in
    this order.

    Args:
        hidden_size: width of both inputs and of the output.
        num_heads: number of heads.
        head_size: width of a head.
        scale: factor on the product of query and key.
        projection_bias: add a bias to the query, key and value projections.
        output_bias: add a bias to the output projection.
        attention_dropout: dropout rate of the attention weights.
        output_dropout: dropout rate of the output.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_size: int,
        scale: float,
        projection_bias: bool,
        output_bias: bool,
        attention_dropout: float,
        output_dropout: float,
    ) -> None:
        super().__init__()
        inner_size = num_heads * head_size
        self.head_size = head_size
        self.scale = scale
        self.attention_dropout = attention_dropout
        self.query = Linear(hidden_size, inner_size, bias=projection_bias)
        self.key_value = Linear(hidden_size, 2 * inner_size, bias=projection_bias)
        self.output = Linear(inner_size, hidden_size, bias=output_bias)
        self.dropout = nn.Dropout(output_dropout)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        """Return the result of the attention of `x` to the sequence `memory`: [batch, queries, hidden].

        Args:
            x: sequence of the queries, [batch, queries, hidden].
            memory: sequence of the keys and values, [batch, keys, hidden].
            seen: True for visible keys; bool, broadcasts to [batch, heads, queries, keys].
        """
        key, value = (self._split_heads(part) for part in self.key_value(memory).chunk(2, dim=-1))
        attended = F.scaled_dot_product_attention(
            self._split_heads(self.query(x)),
            key,
            value,
            attn_mask=seen,
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scale,
        )
        return self.dropout(self.output(attended.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)
