"""Self-attention and the cache of keys and values that generation reuses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear
from headwater.models.layers.linformer import KeyValueProjection
from headwater.models.layers.positions import RotaryStyle, rotate


class LayerCache:
    """Cache of the keys and values of one attention layer.

    Args:
        max_length: maximum tokens in the cache; memory is allocated at the first token.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, seq, head_size], and return all of them so far."""
        start, self.length = self.length, self.length + key.shape[2]
        assert self.length <= self.max_length, f"cache of {self.max_length} tokens is full"
        if self._keys is None or self._values is None:
            shape = (*key.shape[:2], self.max_length, key.shape[3])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        self._keys[:, :, start : self.length] = key
        self._values[:, :, start : self.length] = value
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class KeyValueCache:
    """Caches of all attention layers of a model.

    Args:
        num_layers: attention layers of the model.
        max_length: maximum tokens in the cache.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.layers[0].length


class Seen(NamedTuple):
    """Mask and rotations of the attention in one forward pass, which several layers use.

    Attributes:
        mask: added to the scores (float), or True for visible keys (bool); broadcasts to
            [batch, heads, queries, keys]. `None`: see `causal`.
        rotations: cosines and sines of the new positions, see `positions.rotations`; `None`:
            without rotary embeddings.
        causal: without a mask, each query sees the keys up to its own; a single query after cached keys sees
            all keys. False: each query sees all keys.
    """

    mask: Tensor | None = None
    rotations: tuple[Tensor, Tensor] | None = None
    causal: bool = True


_EVERYTHING_BEFORE = Seen()


def visible(
    queries: Tensor, keys: Tensor, *, window: int | None = None, sinks: int = 0, causal: bool = True
) -> Tensor:
    """Return a mask, bool [queries, keys], that is True for the keys that a query sees.

    Args:
        queries: positions of the queries, [queries].
        keys: positions of the keys, [keys].
        window: maximum number of keys that a query sees, itself included (arXiv:2004.05150, section 3.1);
            `None`: no limit.
        sinks: number of first positions that every query sees in addition to its window (arXiv:2309.17453).
        causal: a query sees no later keys.
    """
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= (distance < window) | (keys < sinks)
    return seen


class SelfAttention(nn.Module):
    """Multi-head self-attention: [batch, seq, hidden] -> [batch, seq, hidden].

    One product computes queries, keys and values; their weights are stacked in this order.

    Args:
        hidden_size: width of input and output.
        num_heads: number of heads.
        head_size: width of a head; by default `hidden_size / num_heads`.
        num_kv_heads: number of heads of keys and values, each shared by a group of adjacent query heads
            (grouped-query attention, arXiv:2305.13245); by default `num_heads`.
        scale: factor on the product of query and key.
        softcap: the constant c: scores `s` become `c·tanh(s/c)` (arXiv:2408.00118, section 2).
        rotary_style: pairs of elements that are rotated together, if `Seen.rotations` is given.
        projection_bias: add a bias to the query, key and value projections.
        output_bias: add a bias to the output projection.
        attention_dropout: dropout rate of the attention weights.
        output_dropout: dropout rate of the output.
        projections: projections of keys and values along the sequence (Linformer). Queries then see all keys
            except padding.
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
        head_size: int | None = None,
        num_kv_heads: int | None = None,
        softcap: float | None = None,
        rotary_style: RotaryStyle = "half",
        projections: KeyValueProjection | None = None,
    ) -> None:
        super().__init__()
        head_size = head_size or hidden_size // num_heads
        num_kv_heads = num_kv_heads or num_heads
        self.num_heads = num_heads
        self.sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
        self.head_size = head_size
        self.scale = scale
        self.softcap = softcap
        self.rotary_style = rotary_style
        self.attention_dropout = attention_dropout
        self.qkv = Linear(hidden_size, sum(self.sizes), bias=projection_bias)
        self.output = Linear(num_heads * head_size, hidden_size, bias=output_bias)
        self.dropout = nn.Dropout(output_dropout)
        self.projections = projections

    def forward(self, x: Tensor, seen: Seen = _EVERYTHING_BEFORE, cache: LayerCache | None = None) -> Tensor:
        query, key, value = (self._split_heads(part) for part in self.qkv(x).split(self.sizes, dim=-1))
        if seen.rotations is not None:
            query, key = (rotate(part, *seen.rotations, self.rotary_style) for part in (query, key))
        past = 0
        if cache is not None:
            past = cache.length
            key, value = cache.extend(key, value)
        mask = _mask_after(past, query) if seen.mask is None else seen.mask
        causal = seen.causal and mask is None and query.shape[2] == key.shape[2]
        if self.projections is not None:
            key, value = self.projections(key, value, mask)
            mask, causal = None, False
        attended = self._attend(query, key, value, mask, causal=causal)
        output: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return output

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                # torch accepts a mask of numbers only in the dtype of the query.
                attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
                dropout_p=dropout,
                is_causal=causal,
                scale=self.scale,
                enable_gqa=key.shape[1] != self.num_heads,
            )
        key, value = (part.repeat_interleave(self.num_heads // part.shape[1], dim=1) for part in (key, value))
        scores = self.softcap * torch.tanh(query @ key.mT * (self.scale / self.softcap)).float()
        if causal:
            positions = torch.arange(key.shape[2], device=key.device)
            mask = visible(positions, positions)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return F.dropout(scores.softmax(-1).to(value.dtype), dropout) @ value

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


def _mask_after(past: int, query: Tensor) -> Tensor | None:
    """Return the mask of new queries over `past` + new keys; `None` if the kernel's own mask is enough."""
    new = query.shape[2]
    if past == 0 or new == 1:
        return None
    positions = torch.arange(past + new, device=query.device)
    return visible(positions[past:], positions)
