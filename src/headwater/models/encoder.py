"""The bidirectional encoder under BERT, RoBERTa and ESM-2."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from headwater.config.models.common import InitializerConfig, Nonlinearity
from headwater.config.models.encoder import EncoderSection
from headwater.core.dry_run import costs_by_shapes
from headwater.core.errors import DataError
from headwater.models.layers.attention import AttentionContext, SelfAttention
from headwater.models.layers.feed_forward import FeedForward
from headwater.models.layers.initializers import BIASES_AND_NORMS, first_match
from headwater.models.layers.linear import Embedding
from headwater.models.layers.linformer import KeyValueProjection, SequenceProjection
from headwater.models.layers.norm import LayerNorm
from headwater.models.layers.positions import rotary_frequencies, rotations


class BlockSection(Protocol):
    """The keys of a model section that blocks read; see `EncoderSection`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def filter_size(self) -> int: ...
    @property
    def encoder_nonlinearity(self) -> Nonlinearity: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def dropout_rate(self) -> float: ...
    @property
    def layer_norm_epsilon(self) -> float: ...
    @property
    def norm_first(self) -> bool: ...


class LayerScale(nn.Module):
    """A learned factor for each element (arXiv:2103.17239, section 2): [..., hidden] -> same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class StochasticDepth(nn.Module):
    """Sets the whole input of random samples to 0 in training (arXiv:1603.09382): [batch, ...] -> same shape.

    The other samples are scaled up, so that the mean does not change.

    Args:
        rate: probability that a sample is set to 0.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        kept = torch.rand(len(x), *(1,) * (x.dim() - 1), device=x.device) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)


@costs_by_shapes
class EncoderBlock(nn.Module):
    """A transformer block: attention and feed-forward layer, [batch, seq, hidden] -> same shape.

    Args:
        config: the model section of a params file.
        projection_bias: add a bias to the query, key and value projections.
        attention_bias: add a bias to the attention's output.
        ffn_bias: add biases to the feed-forward layer.
        layer_scale: scale attention and feed-forward layer by `LayerScale` before they are added.
        stochastic_depth: rate at which each of them is left out in training.
        projections: see `SelfAttention`.
    """

    def __init__(
        self,
        config: BlockSection,
        *,
        projection_bias: bool = True,
        attention_bias: bool = True,
        ffn_bias: bool = True,
        layer_scale: bool = False,
        stochastic_depth: float = 0.0,
        projections: KeyValueProjection | None = None,
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm_first = config.norm_first
        self.attention = SelfAttention(
            width,
            config.num_heads,
            scale=config.attention_scale,
            projection_bias=projection_bias,
            output_bias=attention_bias,
            attention_dropout=config.attention_dropout,
            output_dropout=config.dropout_rate,
            projections=projections,
        )
        self.attention_norm = LayerNorm(width, config.layer_norm_epsilon)
        self.attention_scale = LayerScale(width) if layer_scale else nn.Identity()
        self.ffn = FeedForward(
            width,
            config.filter_size,
            config.encoder_nonlinearity,
            bias=ffn_bias,
            dropout=config.dropout_rate,
        )
        self.ffn_norm = LayerNorm(width, config.layer_norm_epsilon)
        self.ffn_scale = LayerScale(width) if layer_scale else nn.Identity()
        self.path = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor, seen: AttentionContext) -> Tensor:
        if self.norm_first:
            x = x + self.path(self.attention_scale(self.attention(self.attention_norm(x), seen)))
            return x + self.path(self.ffn_scale(self.ffn(self.ffn_norm(x))))  # type: ignore[no-any-return]
        x = self.attention_norm(x + self.path(self.attention_scale(self.attention(x, seen))))
        return self.ffn_norm(x + self.path(self.ffn_scale(self.ffn(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A bidirectional encoder of texts: token ids [batch, seq] -> hidden states [batch, seq, hidden].

    Args:
        config: section of the encoder.
    """

    def __init__(self, config: EncoderSection) -> None:
        super().__init__()
        self.config = config
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.embedding = Embedding(config.vocab_size, width)
        self.position_embedding = (
            Embedding(self._positions, width) if config.position_embedding_type == "learned" else None
        )
        self.segment_embedding = Embedding(config.num_segments, width) if config.num_segments else None
        self.embedding_norm = LayerNorm(width, epsilon) if config.embedding_layer_norm else None
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        linformer = config.linformer
        # Created before the blocks that share it, so that it is named after the encoder, not a block.
        self.projection = self._projection() if linformer and linformer.sharing == "layerwise" else None
        self.blocks = nn.ModuleList(
            EncoderBlock(config, projections=self._projections()) for _ in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(width, epsilon) if config.use_final_layer_norm else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_span: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [batch, seq, hidden].

        Args:
            input_ids: token ids, [batch, seq].
            attention_mask: 0 for padding, to which no token attends, [batch, seq].
            token_type_ids: segment of each token, [batch, seq]; by default all tokens are in segment 0.
            position_ids: position of each token, [batch, seq]; by default 0, 1, 2, …
            attention_span: number of following tokens that belong to the same text, [batch, seq], if several
                texts are packed into a sequence.

        Raises:
            DataError: if a sequence is longer than the model has positions, or several texts are packed into
                it and the model is a Linformer.
        """
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise DataError(
                f"expected a sequence of at most {self.config.max_position_embeddings} tokens, got {length}",
                where="model.max_position_embeddings",
                remedy="use shorter sequences, or train a model with more positions",
            )
        if attention_span is not None and self.config.linformer is not None:
            raise DataError(
                "Linformer adds up all positions of a sequence, and cannot keep packed texts apart",
                where="model.attention_module",
                remedy="prepare the data with one text per sequence",
            )
        if position_ids is None:
            position_ids = self._position_ids(input_ids)
        x = self.embedding_dropout(self._embed(input_ids, attention_mask, token_type_ids, position_ids))
        seen = AttentionContext(_mask(attention_mask, attention_span), self._rotations(position_ids))
        for block in self.blocks:
            x = block(x, seen)
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]

    def _projection(self) -> SequenceProjection:
        assert self.config.linformer is not None, "keys and values are projected"
        return SequenceProjection(self.config.max_position_embeddings, self.config.linformer.projected_length)

    def _projections(self) -> KeyValueProjection | None:
        """Return a block's projections of Linformer, which blocks may share (arXiv:2006.04768, section 4)."""
        linformer = self.config.linformer
        if linformer is None:
            return None
        keys = self.projection or self._projection()
        return KeyValueProjection(keys, self._projection() if linformer.sharing == "headwise" else keys)

    @property
    def _positions(self) -> int:
        """Number of rows of the position embedding. RoBERTa's first position follows the id of padding."""
        config = self.config
        return config.max_position_embeddings + self._first_position

    @property
    def _first_position(self) -> int:
        return self.config.pad_token_id + 1 if self.config.mask_padding_in_positional_embed else 0

    def _position_ids(self, input_ids: Tensor) -> Tensor:
        if not self.config.mask_padding_in_positional_embed:
            return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        text = (input_ids != self.config.pad_token_id).long()
        return text.cumsum(1) * text + self.config.pad_token_id

    def _embed(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None, position_ids: Tensor
    ) -> Tensor:
        config = self.config
        x = self.embedding(input_ids)
        if config.token_dropout:
            x = self._without_masked(x, input_ids, attention_mask)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position_ids)
        if self.segment_embedding is not None:
            segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + self.segment_embedding(segments)
        if config.embeddings_scale != 1:
            x = x * config.embeddings_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if config.token_dropout:
            x = x * attention_mask.unsqueeze(-1).to(x.dtype)
        return x  # type: ignore[no-any-return]

    def _without_masked(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Set the embeddings of masked tokens to 0, and scale the others (ESM-2's token dropout).

        The scale is relative to the fraction of masked tokens in training: 80 % of 15 %.
        """
        masked = input_ids.eq(self.config.mask_token_id or 0)
        x = x.masked_fill(masked.unsqueeze(-1), 0)
        share = masked.sum(-1).float() / attention_mask.sum(-1)
        scale: Tensor = (1 - 0.15 * 0.8) / (1 - share)
        return x * scale.to(x.dtype)[:, None, None]

    def _rotations(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.position_embedding_type != "rotary":
            return None
        frequencies = rotary_frequencies(config.rotary_size, config.rope_theta, device=position_ids.device)
        return rotations(position_ids.unsqueeze(1), frequencies)


def _mask(attention_mask: Tensor, span: Tensor | None) -> Tensor:
    """Return the keys that each query sees, bool [batch, 1, queries or 1, keys]."""
    seen = attention_mask.bool()[:, None, None, :]
    if span is None:
        return seen
    # Tokens belong to the same text if the ends of their texts are equal.
    positions = torch.arange(span.shape[1], device=span.device)
    ends = positions + span
    return seen & (ends[:, None, :, None] == ends[:, None, None, :])


ENCODER_MATRICES = r"(embedding|position_embedding|segment_embedding)\.weight"

_PROJECTIONS = r"(projection|blocks\.\d+\.attention\.projections\.(keys|values))\.weight"

_OF_WIDTH = r"blocks\.\d+\.(attention\.(qkv|output)|ffn\.(input|gate))\.weight"
"""Pattern of the names of the matrices that have one input for each element of a hidden state."""

_OF_FILTER = r"blocks\.\d+\.ffn\.output\.weight"
"""Pattern of the names of the matrices that have one input for each unit of the feed-forward part."""


def encoder_initializer(name: str, config: EncoderSection) -> InitializerConfig | None:
    """Return the initializer of an encoder's parameter by its name in the encoder; `None` for other names."""
    matrix = config.matrix_init
    return first_match(
        name,
        (
            *BIASES_AND_NORMS,
            (ENCODER_MATRICES, matrix),
            *([(_PROJECTIONS, config.linformer.initializer)] if config.linformer else []),
            (_OF_WIDTH, matrix.scaled(config.width_ratio**-0.5)),
            (_OF_FILTER, matrix.scaled(config.filter_ratio**-0.5)),
        ),
    )


def encoder_learning_rate_scale(name: str, config: EncoderSection) -> float:
    """Return the factor on the learning rate of an encoder's parameter by its name in it; 1 without muP."""
    scale = first_match(name, ((_OF_WIDTH, 1 / config.width_ratio), (_OF_FILTER, 1 / config.filter_ratio)))
    return 1.0 if scale is None else scale
