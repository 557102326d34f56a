"""Decoder-only language models, from GPT-2 to Mixtral: one class, whose parts are chosen by its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.config.models.decoder import DecoderConfig
from headwater.core.dry_run import costs_by_shapes
from headwater.core.errors import DataError
from headwater.models.decoder_parameters import init_parameter, layer_namings
from headwater.models.layers.attention import AttentionContext, KeyValueCache, Part, SelfAttention, visible
from headwater.models.layers.experts import MixtureOfExperts
from headwater.models.layers.feed_forward import FeedForward
from headwater.models.layers.initializers import initialize
from headwater.models.layers.linear import Embedding, Linear
from headwater.models.layers.norm import make_norm
from headwater.models.layers.positions import (
    RotaryScaling,
    alibi_bias,
    alibi_slopes,
    rotary_frequencies,
    rotary_magnitude,
    rotations,
    sinusoidal_positions,
)
from headwater.models.lora import add_adapters
from headwater.models.loss import linear_cross_entropy, row_cross_entropies
from headwater.models.sequences import Piece, last_places, positions, side_by_side


@costs_by_shapes
class Block(nn.Module):
    """A transformer block: attention and feed-forward layer, [batch, seq, hidden] -> same shape.

    Args:
        config: the model section of a params file.
        layer: index of the block.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.parallel = config.parallel_blocks
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_heads,
            head_size=config.head_size,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention_scale(layer),
            softcap=config.attention_logit_softcapping,
            rotary_style=config.rotary_style,
            projection_bias=config.use_projection_bias_in_attention,
            output_bias=config.use_ffn_bias_in_attention,
            attention_dropout=config.attention_dropout,
            output_dropout=config.residual_dropout,
        )
        self.attention_post_norm = _norm(config) if config.norm_first_sandwich else None
        shares_norm = config.parallel_blocks and not config.use_untied_layer_norm
        self.ffn_norm = None if shares_norm else _norm(config)
        self.ffn = _feed_forward(config)
        self.ffn_post_norm = _norm(config) if config.norm_first_sandwich else None

    def forward(
        self, x: Tensor, seen: AttentionContext, parts: Sequence[Part] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the new residual stream, and the load-balancing loss (a scalar) of a mixture of experts."""
        normed = self.attention_norm(x)
        attended = self.attention(normed, seen, parts)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        after = x + attended
        if self.ffn_norm is not None:
            normed = self.ffn_norm(x if self.parallel else after)
        given, balance = (
            self.ffn(normed) if isinstance(self.ffn, MixtureOfExperts) else (self.ffn(normed), None)
        )
        if self.ffn_post_norm is not None:
            given = self.ffn_post_norm(given)
        return after + given, balance


def _norm(config: DecoderConfig) -> nn.Module:
    return make_norm(
        config.norm_type,
        config.hidden_size,
        config.layer_norm_epsilon,
        unit_offset=config.norm_unit_offset,
    )


def _feed_forward(config: DecoderConfig) -> FeedForward | MixtureOfExperts:
    moe = config.moe
    if moe is None:
        return FeedForward(
            config.hidden_size,
            config.ffn_size,
            config.nonlinearity,
            bias=config.use_ffn_bias,
            dropout=config.residual_dropout,
        )
    return MixtureOfExperts(
        config.hidden_size,
        config.ffn_size,
        config.nonlinearity,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        num_shared_experts=moe.num_shared_experts,
        null_expert_bias=moe.null_expert_bias,
        bias=config.use_ffn_bias,
        dropout=config.residual_dropout,
    )


class Alibi(nn.Module):
    """ALiBi: attention biases by distance (arXiv:2108.12409).

    Positions of queries [queries] and keys [keys] -> biases [heads, queries, keys], fp32.

    Args:
        num_heads: attention heads.
        trainable: make the slopes parameters instead of constants.
    """

    def __init__(self, num_heads: int, *, trainable: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.slopes = nn.Parameter(torch.empty(num_heads)) if trainable else None

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        if self.slopes is None:
            return alibi_bias(alibi_slopes(self.num_heads, device=queries.device), queries, keys)
        return alibi_bias(self.slopes, queries, keys)


class Head(Linear):
    """The language-model head: logits of hidden states, or the loss without all logits in memory."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=config.use_bias_in_output)
        self.scale = config.logits_scale
        self.softcap = config.final_logit_softcapping
        self.cross_entropy: Callable[..., Tensor] = linear_cross_entropy

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        row_weights: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Return logits, cross-entropies or the loss.

        Args:
            hidden: hidden states [..., width].
            targets: token ids [...].
            row_weights: factor of each target's cross-entropy in the loss, [...].
            predicted: with `targets` alone: if given, filled with the most likely tokens, int64 [n] for
                hidden states [n, width].

        Returns:
            The logits [..., vocab]; with `targets` the cross-entropies [...], without gradients; with
            `targets` and `row_weights` the loss, a scalar.
        """
        bias: Tensor | None = self.bias
        if self.scale != 1:
            hidden = hidden * self.scale
            bias = None if bias is None else bias * self.scale
        if targets is None:
            logits = self.multiply(hidden, self.weight, bias)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if row_weights is None:
            rows = hidden.flatten(0, -2)
            losses = row_cross_entropies(
                rows, self.weight, bias, targets.flatten(), softcap=self.softcap, predicted=predicted
            )
            return losses.view(targets.shape)
        return self.cross_entropy(
            hidden.flatten(0, -2),
            self.weight,
            bias,
            targets.flatten(),
            row_weights.flatten(),
            softcap=self.softcap,
        )


class Inserted(NamedTuple):
    """Vectors that replace the embeddings of some tokens.

    Attributes:
        vectors: the vectors, [batch, n, hidden].
        places: position of each vector in its sequence, [batch, n]; a position beyond the end drops the
            vector.
    """

    vectors: Tensor
    places: Tensor

    def into(self, x: Tensor) -> Tensor:
        """Return a copy of `x` [batch, seq, hidden] in which the vectors replace those at their positions."""
        length = x.shape[1]
        index = self.places.clamp(max=length).unsqueeze(-1).expand_as(self.vectors)
        # One extra position takes the dropped vectors, and is cut off again.
        longer = torch.cat((x, x.new_zeros(len(x), 1, x.shape[2])), dim=1)
        return longer.scatter(1, index, self.vectors.to(x.dtype))[:, :length]


class Decoder(nn.Module):
    """A decoder-only language model. `forward` returns the training loss, `logits` the predictions.

    Every parameter belongs to a leaf module that reads it in its own `forward`. On the meta device the
    weights have no values; elsewhere they are drawn by `reset_parameters(seed)`.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        kind = config.position_embedding_type
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = (
            Embedding(config.max_position_embeddings, config.hidden_size) if kind == "learned" else None
        )
        self.alibi = (
            Alibi(config.num_heads, trainable=config.alibi_trainable_slopes) if kind == "alibi" else None
        )
        self.embedding_norm = _norm(config) if config.embedding_layer_norm else None
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.head = Head(config)
        if config.share_embedding_weights:
            # Before `reset_parameters`, which then draws the shared weight once, under the embedding's name.
            self.head.weight = self.embedding.weight
        if config.lora_params is not None:
            add_adapters(self, config.lora_params, lambda name: layer_namings(name, config))
        self.reset_parameters(seed)

    def forward(self, batch: Mapping[str, Tensor], inserted: Inserted | None = None) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: `input_ids`, `labels` and `attention_mask`, each [batch, seq]. The mask is 1 where the
                label counts in the loss; it does not hide tokens from the attention. If several texts are
                packed into a sequence, `position_ids` [batch, seq] is the position of a token in its text,
                and `attention_span` [batch, seq] the number of following tokens that attend to it.
            inserted: vectors that replace the embeddings of some tokens.

        Raises:
            DataError: if a sequence is longer than the model has positions.
        """
        mask = batch["attention_mask"].float()
        hidden, balance = self._run(
            batch["input_ids"],
            position_ids=batch.get("position_ids"),
            attention_span=batch.get("attention_span"),
            inserted=inserted,
        )
        loss: Tensor = self.head(hidden, batch["labels"], self._label_weights(mask))
        moe = self.config.moe
        return loss if balance is None or moe is None else loss + moe.load_balancing_loss_coef * balance

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits [batch, seq, vocab] of the token after each of `input_ids` [batch, seq]."""
        return self.head(self.hidden(input_ids))  # type: ignore[no-any-return]

    def next_logits(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the logits [pieces, vocab] of the token after the last one of each piece.

        Args:
            pieces: new tokens of some sequences, with the caches of the tokens before them.
        """
        at = positions(pieces)
        counts = [len(piece.tokens) for piece in pieces]
        spans = [
            (piece.cache.length, piece.cache.length + count)
            for piece, count in zip(pieces, counts, strict=True)
        ]
        longest = max(end for _, end in spans)
        self._check_length(longest)
        x = self._embed(side_by_side(pieces), at)
        seen = AttentionContext(None, self._rotations(at))
        keys = torch.arange(longest, device=at.device)
        masks = {
            window: [self._mask(keys[start:end], keys[:end], window) for start, end in spans]
            for window in self._windows()
        }

        def parts(layer: int) -> list[Part]:
            caches = [piece.cache.layers[layer] for piece in pieces]
            return list(map(Part, counts, caches, masks[self.config.window(layer)]))

        hidden, _ = self._layers(x, lambda layer: (seen, parts(layer)))
        return self.head(hidden[0, last_places(pieces)])  # type: ignore[no-any-return]

    def hidden(self, input_ids: Tensor, *, inserted: Inserted | None = None) -> Tensor:
        """Return the normalized hidden states [batch, seq, hidden] that the head reads.

        Args:
            input_ids: tokens, [batch, seq].
            inserted: vectors that replace the embeddings of some tokens.
        """
        return self._run(input_ids, inserted=inserted)[0]

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence in tokens."""
        return self.config.max_position_embeddings

    def new_cache(self, max_length: int) -> KeyValueCache:
        """Return an empty cache for a sequence of up to `max_length` tokens."""
        return KeyValueCache(self.config.num_hidden_layers, max_length)

    def token_scores(
        self, input_ids: Tensor, positions: Tensor, rows: Tensor, columns: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the log-likelihoods of tokens, and which of them are the most likely ones.

        Only logits of the requested tokens are computed, and few of them are in memory at once.

        Args:
            input_ids: tokens [batch, seq], padded at the end.
            positions: positions after which tokens are scored, [positions].
            rows: sequence of each scored token, [n].
            columns: index into `positions` of the token before each scored one, [n].
            targets: the scored tokens, [n].

        Returns:
            Log-likelihoods, and 1 for the most likely tokens or 0 for others: [2, n] in fp32.
        """
        predicted = torch.empty_like(targets)
        losses = self.head(self.hidden(input_ids)[rows, positions[columns]], targets, None, predicted)
        return torch.stack([-losses, (predicted == targets).to(losses.dtype)])

    def reset_parameters(self, seed: int) -> None:
        """Draw all weights again, unless they are on the meta device; see `init_parameter`."""
        initialize(self, lambda name, shape: init_parameter(name, shape, self.config, seed))

    def _run(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_span: Tensor | None = None,
        inserted: Inserted | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states that the head reads, and the mean load-balancing loss of the layers."""
        self._check_length(input_ids.shape[1])
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        at = places if position_ids is None else position_ids
        x = self._embed(input_ids, at, inserted)
        turns = self._rotations(at)
        masks = {window: self._mask(places, places, window, attention_span) for window in self._windows()}
        return self._layers(x, lambda layer: (AttentionContext(masks[self.config.window(layer)], turns),))

    def _windows(self) -> set[int | None]:
        """Return the windows of all layers.

        Layers with the same window share a mask, which has as many elements as the scores of a head.
        """
        return {self.config.window(layer) for layer in range(len(self.blocks))}

    def _layers(self, x: Tensor, more: Callable[[int], tuple[Any, ...]]) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states that the head reads, and the mean load-balancing loss of the layers.

        Args:
            x: embeddings, [batch, seq, hidden].
            more: returns the further arguments of the block of a layer.
        """
        balances = []
        for layer, block in enumerate(self.blocks):
            x, balance = block(x, *more(layer))
            if balance is not None:
                balances.append(balance)
        return self.norm(x), torch.stack(balances).mean() if balances else None

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise DataError(
                f"expected a sequence of at most {self.max_length} tokens, got {length}",
                where="model.max_position_embeddings",
                remedy="use shorter sequences, or train a model with more positions",
            )

    def _embed(self, input_ids: Tensor, positions: Tensor, inserted: Inserted | None = None) -> Tensor:
        x = self.embedding(input_ids)
        if inserted is not None:
            x = inserted.into(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        elif self.config.position_embedding_type == "fixed":
            table = sinusoidal_positions(self.max_length, self.config.hidden_size, device=x.device)
            x = x + table[positions].to(x.dtype)
        if self.config.embeddings_scale != 1:
            x = x * self.config.embeddings_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.embedding_dropout(x)  # type: ignore[no-any-return]

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.position_embedding_type != "rotary":
            return None
        scaling = _rotary_scaling(config)
        frequencies = rotary_frequencies(
            config.rotary_size, config.rope_theta, scaling, device=positions.device
        )
        if positions.dim() == 2:
            positions = positions.unsqueeze(1)  # the same for every head
        return rotations(positions, frequencies, magnitude=rotary_magnitude(scaling))

    def _mask(
        self, queries: Tensor, keys: Tensor, window: int | None, span: Tensor | None = None
    ) -> Tensor | None:
        """Return `AttentionContext.mask`; `None` if each query sees all keys up to its own position."""
        all_before = window is None or window >= len(keys)
        if all_before and span is None and self.alibi is None:
            return None
        seen = visible(queries, keys, window=window, sinks=self.config.attention_sink_tokens)
        if span is not None:
            seen = seen & (queries[:, None] - keys[None, :] <= span[:, None, :])
            seen = seen.unsqueeze(1)  # the same for every head
        if self.alibi is None:
            return seen
        biases: Tensor = self.alibi(queries, keys)
        return biases.masked_fill(~seen, -torch.inf)

    def _label_weights(self, mask: Tensor) -> Tensor:
        """Return the factor of each label's cross-entropy in the loss. A batch without labels has loss 0."""
        if self.config.loss_scaling == "batch_size":
            return mask * (self.config.loss_weight / len(mask))
        return mask / mask.sum().clamp_min(torch.finfo(mask.dtype).tiny)


def _rotary_scaling(config: DecoderConfig) -> RotaryScaling | None:
    if config.pos_scaling_type is None:
        return None
    more = config.pos_scaling_extra_args.model_dump(exclude_none=True)
    original = more.pop("original_max_position_embeddings", config.max_position_embeddings)
    return RotaryScaling(config.pos_scaling_type, config.pos_scaling_factor, original_length=original, **more)


def num_labels(config: DecoderConfig, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of labels over which the loss of a batch is a mean; `None`: a mean over samples."""
    return None if config.loss_scaling == "batch_size" else batch["attention_mask"].sum()
