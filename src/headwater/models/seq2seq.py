"""Encoder-decoders: one class for T5 and the original transformer, whose parts are chosen by its config."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.seq2seq import Seq2SeqConfig, StackName
from headwater.core.batches import IGNORED
from headwater.core.dry_run import costs_by_shapes
from headwater.core.errors import DataError
from headwater.models.evaluation import Accuracy
from headwater.models.layers.attention import AttentionContext, SelfAttention, visible
from headwater.models.layers.cross_attention import CrossAttention
from headwater.models.layers.feed_forward import FeedForward
from headwater.models.layers.initializers import initialize
from headwater.models.layers.linear import Embedding, Linear
from headwater.models.layers.norm import make_norm
from headwater.models.layers.positions import sinusoidal_positions
from headwater.models.layers.relative_positions import RelativePositionBias
from headwater.models.loss import linear_cross_entropy
from headwater.models.seq2seq_parameters import init_parameter

_ROWS = 1024
"""Number of rows of logits that are in memory at once if only the best tokens are needed."""


def _norm(config: Seq2SeqConfig) -> nn.Module:
    return make_norm(config.norm_type, config.d_model, config.layer_norm_epsilon)


@costs_by_shapes
class Block(nn.Module):
    """A transformer block: self-attention, in the decoder also cross-attention, and feed-forward layer.

    [batch, seq, hidden] -> same shape.

    Args:
        config: the model section of a params file.
        stack: stack of the block.
    """

    def __init__(self, config: Seq2SeqConfig, stack: StackName) -> None:
        super().__init__()
        self.norm_first = config.use_pre_encoder_decoder_layer_norm
        self.attention = SelfAttention(
            config.d_model,
            config.num_heads,
            head_size=config.d_kv,
            scale=config.attention_scale(stack),
            projection_bias=config.use_projection_bias_in_attention,
            output_bias=False,
            attention_dropout=config.dropout_rate,
            output_dropout=config.dropout_rate,
        )
        self.attention_norm = _norm(config)
        self.cross_attention = self.cross_attention_norm = None
        if stack == "decoder":
            self.cross_attention = CrossAttention(
                config.d_model,
                config.num_heads,
                head_size=config.d_kv,
                scale=config.attention_scale(stack),
                projection_bias=config.use_projection_bias_in_attention,
                output_bias=False,
                attention_dropout=config.dropout_rate,
                output_dropout=config.dropout_rate,
            )
            self.cross_attention_norm = _norm(config)
        self.ffn = FeedForward(
            config.d_model,
            config.d_ff,
            config.nonlinearity(stack),
            bias=config.use_ffn_bias,
            dropout=config.dropout_rate,
            inner_dropout=config.ffn_dropout,
        )
        self.ffn_norm = _norm(config)

    def forward(
        self,
        x: Tensor,
        seen: AttentionContext,
        memory: Tensor | None = None,
        memory_seen: Tensor | None = None,
    ) -> Tensor:
        x = self._add(self.attention_norm, self.attention, x, seen)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            x = self._add(self.cross_attention_norm, self.cross_attention, x, memory, memory_seen)
        return self._add(self.ffn_norm, self.ffn, x)

    def _add(self, norm: nn.Module, part: nn.Module, x: Tensor, *more: object) -> Tensor:
        """Return the residual stream after one layer of the block, with its norm before or after it."""
        if self.norm_first:
            return x + part(norm(x), *more)  # type: ignore[no-any-return]
        return norm(x + part(x, *more))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """The encoder or the decoder, without token embeddings: [batch, seq, hidden] -> same shape.

    Args:
        config: the model section of a params file.
        stack: "encoder" or "decoder".
    """

    def __init__(self, config: Seq2SeqConfig, stack: StackName) -> None:
        super().__init__()
        kind, self.width = config.position_embedding_type, config.d_model
        self.stack, self.max_length = stack, config.max_length(stack)
        self.is_fixed = kind == "fixed"
        self.position_embedding = (
            Embedding(self.max_length, self.width) if kind == "learned_absolute" else None
        )
        self.relative_bias = (
            RelativePositionBias(
                config.relative_attention_num_buckets,
                config.num_heads,
                max_distance=config.relative_attention_max_distance,
                bidirectional=stack == "encoder",
            )
            if kind == "relative"
            else None
        )
        self.embedding_dropout = nn.Dropout(config.dropout_rate)
        self.blocks = nn.ModuleList(Block(config, stack) for _ in range(config.num_layers(stack)))
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout_rate if config.use_dropout_outside_residual_path else 0.0)

    def forward(self, x: Tensor, text: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the hidden states [batch, seq, hidden].

        Args:
            x: embeddings, [batch, seq, hidden].
            text: True for a token of the source that is not padding, bool [batch, source].
            memory: in the decoder, the output of the encoder, [batch, source, hidden].

        Raises:
            DataError: if there are more tokens than the model has positions.
        """
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.embedding_dropout(self._add_positions(x, positions))
        padding = text[:, None, None, :]
        if self.stack == "encoder":
            seen = AttentionContext(self._biased(positions, padding))
            for block in self.blocks:
                x = block(x, seen)
        else:
            seen = AttentionContext()
            if self.relative_bias is not None:
                seen = AttentionContext(self._biased(positions, visible(positions, positions)))
            for block in self.blocks:
                x = block(x, seen, memory, padding)
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]

    def _add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.relative_bias is None and len(positions) > self.max_length:
            key = "src" if self.stack == "encoder" else "tgt"
            raise DataError(
                f"expected a sequence of at most {self.max_length} tokens in the {self.stack}, "
                f"got {len(positions)}",
                where=f"model.{key}_max_position_embeddings",
                remedy="use shorter sequences, or train a model with more positions",
            )
        if self.position_embedding is not None:
            return x + self.position_embedding(positions)  # type: ignore[no-any-return]
        if self.is_fixed:
            return x + sinusoidal_positions(len(positions), self.width, device=x.device).to(x.dtype)
        return x

    def _biased(self, positions: Tensor, seen: Tensor) -> Tensor:
        """Return `AttentionContext.mask` for a mask of visible keys; adds the relative bias of the stack."""
        if self.relative_bias is None:
            return seen
        bias: Tensor = self.relative_bias(positions)
        return torch.where(seen, bias, -torch.inf)


class Head(Linear):
    """The language-model head: logits of hidden states, or the loss without all logits in memory."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config.d_model, config.target_tokens, bias=False)
        self.scale = config.logits_scale
        self.smoothing = config.label_smoothing

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        row_weights: Tensor | None = None,
        *,
        best: bool = False,
    ) -> Tensor:
        """Return logits, best tokens or the loss.

        Args:
            hidden: hidden states, [..., width].
            targets: token ids, [...].
            row_weights: factor of each target's cross-entropy in the loss, [...].
            best: return the best tokens.

        Returns:
            The logits [..., vocab]; with `best` the tokens with the highest logits [...]; with `targets` and
            `row_weights` the loss, a scalar.
        """
        hidden = hidden * self.scale
        rows = hidden.flatten(0, -2)
        if best:
            parts = [F.linear(part, self.weight).argmax(-1) for part in rows.split(_ROWS)]
            return torch.cat(parts).view(hidden.shape[:-1])
        if targets is None or row_weights is None:
            return F.linear(hidden, self.weight)
        targets, row_weights = targets.flatten(), row_weights.flatten()
        loss = linear_cross_entropy(rows, self.weight, None, targets, row_weights)
        if self.smoothing and self.training:
            loss = loss + self.smoothing * self._over_mean(rows, targets, row_weights)
        return loss

    def _over_mean(self, rows: Tensor, targets: Tensor, row_weights: Tensor) -> Tensor:
        """Return the weighted sum of (logit of the target - mean logit of all tokens).

        With label smoothing `s` (arXiv:1512.00567, section 7) the cross-entropy grows by `s` times this sum.
        """
        at_target = F.embedding(targets.long().masked_fill(row_weights == 0, 0), self.weight)
        above = (rows.float() * (at_target - self.weight.mean(0)).float()).sum(-1)
        return (above * row_weights).sum()


class Seq2Seq(nn.Module):
    """An encoder-decoder. `forward` returns the training loss, `logits` the predictions.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: Seq2SeqConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.source_tokens, config.d_model)
        self.target_embedding = (
            None
            if config.share_encoder_decoder_embedding
            else Embedding(config.target_tokens, config.d_model)
        )
        self.encoder = Stack(config, "encoder")
        self.decoder = Stack(config, "decoder")
        self.head = Head(config)
        if config.share_embedding_weights:
            self.head.weight = (self.target_embedding or self.embedding).weight
        self.scored = {"accuracy": Accuracy("accuracy")} if config.compute_eval_metrics else {}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: `input_ids` and `attention_mask` [batch, source], 0 for padding, to which no token attends;
                `decoder_input_ids`, `labels` and `decoder_attention_mask` [batch, target], 0 where the label
                does not count; and optionally `loss_weight` [batch, 1], a weight per sample. A label
                `IGNORED` does not count either.

        Raises:
            DataError: if there are more tokens than the model has positions.
        """
        labels, counted = batch["labels"], _counted(batch)
        hidden = self._hidden(batch)
        if not self.training and self.scored:
            self.scored["accuracy"].add(self.head(hidden, best=True) == labels, counted)
        return self.head(hidden, labels, self._label_weights(counted, batch))  # type: ignore[no-any-return]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, target, vocab] of the token after each decoder input; see `forward`."""
        return self.head(self._hidden(batch))  # type: ignore[no-any-return]

    def encode(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states [batch, source, hidden] of the source; see `forward`."""
        return self.encoder(self._embed(self.embedding, batch["input_ids"]), _text(batch))  # type: ignore[no-any-return]

    def decode(self, decoder_input_ids: Tensor, memory: Tensor, text: Tensor) -> Tensor:
        """Return the hidden states [batch, target, hidden] of the decoder.

        Args:
            decoder_input_ids: token ids, [batch, target].
            memory: result of `encode`, [batch, source, hidden].
            text: True for a token of the source that is not padding, bool [batch, source].
        """
        embedding = self.embedding if self.target_embedding is None else self.target_embedding
        return self.decoder(self._embed(embedding, decoder_input_ids), text, memory)  # type: ignore[no-any-return]

    def _hidden(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.decode(batch["decoder_input_ids"], self.encode(batch), _text(batch))

    def _embed(self, embedding: nn.Module, tokens: Tensor) -> Tensor:
        return embedding(tokens) * self.config.embeddings_scale  # type: ignore[no-any-return]

    def _label_weights(self, counted: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the factor of each label's cross-entropy in the loss. A batch without labels has loss 0."""
        config, weights = self.config, counted.float()
        if config.mlm_loss_scaling == "num_masked":
            return weights / weights.sum().clamp_min(1)
        if config.mlm_loss_scaling == "precomputed_num_masked" and "loss_weight" in batch:
            return weights * batch["loss_weight"] / len(weights)
        return weights * (config.lm_loss_weight / len(weights))


def _counted(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the labels that count in the loss, bool [batch, target]."""
    counted = batch["labels"] != IGNORED
    mask = batch.get("decoder_attention_mask")
    return counted if mask is None else counted & mask.bool()


def _text(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the source tokens that are not padding, bool [batch, source]."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def num_labels(config: Seq2SeqConfig, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of labels over which the loss of a batch is a mean; `None`: a mean over samples."""
    return _counted(batch).sum() if config.mlm_loss_scaling == "num_masked" else None
