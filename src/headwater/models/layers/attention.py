"""Self-attention and the cache of keys and values that generation reuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.attention import AttentionKernel, fused_attention
from headwater.models.layers.linear import Linear
from headwater.models.layers.linformer import KeyValueProjection
from headwater.models.layers.positions import RotaryStyle, rotate


class LayerCache:
    """Cache of the keys and values of one sequence in one attention layer.

    Args:
        max_length: maximum tokens in the cache; memory is allocated at the first token.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [1, heads, seq, head_size], and return all of them so far."""
        count = key.shape[2]
        start, self.length = self.length, self.length + count
        assert self.length <= self.max_length, f"cache of {self.max_length} tokens is full"
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                part.new_empty((*part.shape[:2], self.max_length, part.shape[3])) for part in (key, value)
            )
        # `narrow`, because indexing in Python would take longer than the copy of one token.
        self._keys.narrow(2, start, count).copy_(key)
        self._values.narrow(2, start, count).copy_(value)
        return self._keys.narrow(2, 0, self.length), self._values.narrow(2, 0, self.length)

    def fork(self) -> LayerCache:
        """Return a copy of the cache."""
        copy = LayerCache(self.max_length)
        if self._keys is not None and self._values is not None:
            copy.extend(self._keys[:, :, : self.length], self._values[:, :, : self.length])
        return copy


class KeyValueCache:
    """Caches of all attention layers of a model, for one sequence.

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

    def skip(self, count: int) -> int:
        """Count `count` tokens as read without keys and values, for a dry run. Return the number counted."""
        for layer in self.layers:
            layer.length += count
        return count

    def fork(self) -> KeyValueCache:
        """Return a copy of the cache, for another continuation of the same tokens."""
        copy = KeyValueCache(0, 0)
        copy.layers = [layer.fork() for layer in self.layers]
        return copy


class Part(NamedTuple):
    """The tokens of one sequence in a layer that reads new tokens of several sequences side by side.

    Attributes:
        new: number of new tokens.
        cache: keys and values of the sequence in this layer.
        mask: see `AttentionContext.mask`, for the new tokens over all tokens of the sequence. `None`: each
            new token sees the tokens up to itself.
    """

    new: int
    cache: LayerCache
    mask: Tensor | None = None


class AttentionContext(NamedTuple):
    """Mask and rotations of the attention in one forward pass, which several layers use.

    Attributes:
        mask: added to the scores (float), or True for visible keys (bool); broadcasts to
            [batch, heads, queries, keys]. `None`: see `causal`. Not used if the layer gets `Part`s.
        rotations: cosines and sines of the new positions, see `positions.rotations`; `None`:
            without rotary embeddings.
        causal: without a mask, each query sees the keys up to its own. False: each query sees all keys.
    """

    mask: Tensor | None = None
    rotations: tuple[Tensor, Tensor] | None = None
    causal: bool = True


_CAUSAL = AttentionContext()


def visible(
    queries: Tensor, keys: Tensor, *, window: int | None = None, sinks: int = 0, causal: bool = True
) -> Tensor:
    """Return a mask, bool [..., queries, keys], that is True for the keys that a query sees.

    Args:
        queries: positions of the queries, [..., queries].
        keys: positions of the keys, [..., keys].
        window: maximum number of keys that a query sees, itself included (arXiv:2004.05150, section 3.1);
            `None`: no limit.
        sinks: number of first positions that every query sees in addition to its window (arXiv:2309.17453).
        causal: a query sees no later keys.
    """
    distance = queries[..., :, None] - keys[..., None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= (distance < window) | (keys[..., None, :] < sinks)
    return seen


class Scoring(NamedTuple):
    """The steps from scores of queries and keys to weights.

    Attributes:
        scale: factor on the product of query and key; 1 / √(head size) if not given.
        softcap: see `SelfAttention`.
        dropout: dropout rate of the weights.
        kernel: the kernel of attention; see `use_torch_attention`.
    """

    scale: float | None
    softcap: float | None = None
    dropout: float = 0.0
    kernel: AttentionKernel = "auto"


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
        rotary_style: pairs of elements that are rotated together, if `AttentionContext.rotations` is given.
        projection_bias: add a bias to the query, key and value projections.
        output_bias: add a bias to the output projection.
        attention_dropout: dropout rate of the attention weights.
        output_dropout: dropout rate of the output.
        projections: projections of keys and values along the sequence (Linformer). Queries then see all keys
            except padding.

    Attributes:
        kernel: the kernel of attention; see `use_torch_attention`.
    """

    kernel: AttentionKernel = "auto"

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

    def forward(
        self, x: Tensor, seen: AttentionContext = _CAUSAL, parts: Sequence[Part] | None = None
    ) -> Tensor:
        """Return the output of the layer.

        Args:
            x: the input, [batch, seq, hidden].
            seen: mask and rotations.
            parts: if given, `x` [1, seq, hidden] has new tokens of several sequences side by side, and keys
                and values of the tokens before them are in their caches.
        """
        query, key, value = (self._split_heads(part) for part in self.qkv(x).split(self.sizes, dim=-1))
        if seen.rotations is not None:
            query, key = (rotate(part, *seen.rotations, self.rotary_style) for part in (query, key))
        scoring = Scoring(
            self.scale, self.softcap, self.attention_dropout if self.training else 0.0, self.kernel
        )
        if parts is not None:
            attended = attend_parts(query, key, value, parts, scoring._replace(dropout=0.0))
        else:
            mask, causal = seen.mask, seen.causal and seen.mask is None
            if self.projections is not None:
                key, value = self.projections(key, value, mask)
                mask, causal = None, False
            attended = attend(query, key, value, mask, scoring, causal=causal)
        output: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return output

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


def use_torch_attention(model: nn.Module) -> None:
    """Make the layers of a model compute all attention by torch's kernels."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.kernel = "torch"


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, *, causal: bool
) -> Tensor:
    """Return the attention of queries over keys and values, [batch, heads, queries, head size].

    Args:
        query: queries, [batch, heads, queries, head size].
        key: keys, [batch, heads or fewer, keys, head size].
        value: values, likewise.
        mask: see `AttentionContext.mask`.
        scoring: how scores become weights.
        causal: each query sees the keys up to its own; only without a mask.
    """
    scale, softcap, dropout, kernel = scoring
    if softcap is None:
        return fused_attention(
            query, key, value, causal=causal, mask=mask, dropout=dropout, scale=scale, kernel=kernel
        )
    heads = query.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap)).float()
    if causal:
        positions = torch.arange(key.shape[2], device=key.device)
        mask = visible(positions, positions)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1).to(value.dtype), dropout) @ value


def attend_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scoring: Scoring
) -> Tensor:
    """Append new keys and values to caches, and return the attention of each sequence over its own tokens.

    Args:
        query: queries of new tokens of the sequences side by side, [1, heads, tokens, head size].
        key: their keys, [1, heads or fewer, tokens, head size].
        value: their values, likewise.
        parts: the sequences.
        scoring: how scores become weights.

    Returns:
        [1, heads, tokens, head size].
    """
    if len(parts) == 1:
        return _attend_part(query, key, value, parts[0], scoring)
    counts = [part.new for part in parts]
    attended = [
        _attend_part(queries, keys, values, part, scoring)
        for queries, keys, values, part in zip(
            query.split(counts, 2), key.split(counts, 2), value.split(counts, 2), parts, strict=True
        )
    ]
    return torch.cat(attended, 2)


def _attend_part(query: Tensor, key: Tensor, value: Tensor, part: Part, scoring: Scoring) -> Tensor:
    keys, values = part.cache.extend(key, value)
    mask = part.mask
    if mask is None and 1 < part.new < keys.shape[2]:
        positions = torch.arange(keys.shape[2], device=keys.device)
        mask = visible(positions[-part.new :], positions)
    return attend(query, keys, values, mask, scoring, causal=mask is None and part.new > 1)
