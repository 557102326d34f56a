"""Causal self-attention and the cache of keys and values that generation reuses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear


class LayerCache:
    """Keys and values that one attention layer has seen.

    Args:
        max_length: tokens it can hold; memory is taken at the first token.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones [batch, heads, seq, head_size] appended."""
        start, self.length = self.length, self.length + key.shape[2]
        assert self.length <= self.max_length, f"cache of {self.max_length} tokens is full"
        if self._keys is None or self._values is None:
            shape = (*key.shape[:2], self.max_length, key.shape[3])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        self._keys[:, :, start : self.length] = key
        self._values[:, :, start : self.length] = value
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KeyValueCache:
    """The caches of all layers of a model.

    Args:
        num_layers: attention layers of the model.
        max_length: tokens each can hold.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length


class SelfAttention(nn.Module):
    """Causal multi-head self-attention: [batch, seq, hidden] -> [batch, seq, hidden].

    Query, key and value come from one product, their weights stacked in this order.

    Args:
        hidden_size: width of input and output.
        num_heads: heads; divides `hidden_size`.
        scale: factor on the product of query and key.
        projection_bias: bias of the query, key and value projections.
        output_bias: bias of the output projection.
        attention_dropout: rate on the attention weights.
        output_dropout: rate on the output.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        scale: float,
        projection_bias: bool,
        output_bias: bool,
        attention_dropout: float,
        output_dropout: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.attention_dropout = attention_dropout
        self.qkv = Linear(hidden_size, 3 * hidden_size, bias=projection_bias)
        self.output = Linear(hidden_size, hidden_size, bias=output_bias)
        self.dropout = nn.Dropout(output_dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        query, key, value = (self._split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        past = 0
        if cache is not None:
            past = cache.length
            key, value = cache.extend(key, value)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_mask_after(past, query),
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=past == 0,
            scale=self.scale,
        )
        output: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return output

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)


def _mask_after(past: int, query: Tensor) -> Tensor | None:
    """Which of `past` + new keys each new query may see; `None` where a kernel's own masking serves."""
    new = query.shape[2]
    if past == 0 or new == 1:
        return None
    return torch.ones(new, past + new, dtype=torch.bool, device=query.device).tril(past)
