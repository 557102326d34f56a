"""GPT-2 and GPT-3 style language models: a pre-norm decoder with learned positions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models import GPTConfig, InitializerConfig
from headwater.core.errors import DataError
from headwater.models.layers.attention import KeyValueCache, LayerCache, SelfAttention
from headwater.models.layers.feed_forward import FeedForward
from headwater.models.layers.initializers import draw
from headwater.models.layers.linear import Embedding, Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.loss import linear_cross_entropy, plain_cross_entropy


class Block(nn.Module):
    """Attention and feed-forward part, each added to the residual stream: [batch, seq, hidden] -> same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attention = SelfAttention(
            config.hidden_size,
            config.num_heads,
            scale=config.attention_scale,
            projection_bias=config.use_projection_bias_in_attention,
            output_bias=config.use_ffn_bias_in_attention,
            attention_dropout=config.attention_dropout,
            output_dropout=config.dropout_rate,
        )
        self.ffn_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.ffn = FeedForward(
            config.hidden_size,
            config.ffn_size,
            config.nonlinearity,
            bias=config.use_ffn_bias,
            dropout=config.dropout_rate,
        )

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        output: Tensor = x + self.ffn(self.ffn_norm(x))
        return output


class Head(Linear):
    """The language-model head: logits of hidden states, or the loss without ever holding all logits."""

    def __init__(self, config: GPTConfig, *, fused_loss: bool) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=config.use_bias_in_output)
        self.scale = config.output_logits_scale
        self.fused_loss = fused_loss

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        """Logits [..., vocab] of `hidden` [..., width]; with targets and row weights [...] the loss."""
        bias: Tensor | None = self.bias
        if self.scale != 1:
            hidden = hidden * self.scale
            bias = None if bias is None else bias * self.scale
        if targets is None or row_weights is None:
            return F.linear(hidden, self.weight, bias)
        cross_entropy = linear_cross_entropy if self.fused_loss else plain_cross_entropy
        return cross_entropy(
            hidden.flatten(0, -2), self.weight, bias, targets.flatten(), row_weights.flatten()
        )


class GPT(nn.Module):
    """A decoder-only language model. `forward` gives the training loss, `logits` the predictions.

    Every parameter belongs to a leaf module that reads it in its own forward. On the meta device no value
    is drawn; elsewhere the weights are those of `reset_parameters(seed)`.

    Args:
        config: the model section of a params file.
        fused_loss: compute the loss in chunks, without the logits of the whole batch in memory.
        seed: seed of the initial weights.
    """

    def __init__(self, config: GPTConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.head = Head(config, fused_loss=fused_loss)
        if config.share_embedding_weights:
            self.head.weight = self.embedding.weight
        if not self.embedding.weight.is_meta:
            self.reset_parameters(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Training loss, a scalar in fp32.

        Args:
            batch: `input_ids`, `labels` and `attention_mask`, each [batch, seq]. The mask is 1 where the
                label counts for the loss; it does not hide tokens from the attention.

        Raises:
            DataError: if a sequence is longer than the model has positions.
        """
        mask = batch["attention_mask"].float()
        return self.head(self.hidden(batch["input_ids"]), batch["labels"], self._label_weights(mask))  # type: ignore[no-any-return]

    def logits(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of the token after each of `input_ids` [batch, seq].

        Args:
            input_ids: tokens; with a cache only those that it has not seen.
            cache: keys and values of the tokens before; extended in place.
        """
        return self.head(self.hidden(input_ids, cache))  # type: ignore[no-any-return]

    def next_logits(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits [batch, vocab] of the token after the last of `input_ids`; see `logits`."""
        return self.head(self.hidden(input_ids, cache)[:, -1])  # type: ignore[no-any-return]

    def hidden(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Normalized hidden states [batch, seq, hidden] that the head reads."""
        start = 0 if cache is None else cache.length
        stop = start + input_ids.shape[1]
        if stop > self.max_length:
            raise DataError(
                f"a sequence of {stop} tokens is longer than the {self.max_length} positions of the model",
                where="model.max_position_embeddings",
                remedy="use shorter sequences, or train a model with more positions",
            )
        positions = torch.arange(start, stop, device=input_ids.device)
        x = self.embedding(input_ids) + self.position_embedding(positions)
        if self.config.embeddings_scale != 1:
            x = x * self.config.embeddings_scale
        x = self.embedding_dropout(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache.layers[index])
        return self.norm(x)  # type: ignore[no-any-return]

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens."""
        return self.config.max_position_embeddings

    def new_cache(self, max_length: int) -> KeyValueCache:
        """An empty cache for sequences of up to `max_length` tokens."""
        return KeyValueCache(self.config.num_hidden_layers, max_length)

    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew; see `init_parameter`."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(init_parameter(name, parameter.shape, self.config, seed))

    def _label_weights(self, mask: Tensor) -> Tensor:
        """Factor of each label's cross-entropy in the loss. A batch without any label has loss 0."""
        if self.config.loss_scaling == "batch_size":
            return mask * (self.config.loss_weight / len(mask))
        return mask / mask.sum().clamp_min(torch.finfo(mask.dtype).tiny)


def init_parameter(name: str, shape: Sequence[int], config: GPTConfig, seed: int) -> Tensor:
    """Initial value of the parameter called `name`, fp32 on the CPU.

    It depends on nothing but the arguments, so a model can be initialised one stage at a time.
    """
    return draw(name, shape, _initializer(name, config), seed, parts=3 if ".qkv." in name else 1)


def _initializer(name: str, config: GPTConfig) -> InitializerConfig:
    for pattern, initializer in (
        (r".*\bbias", InitializerConfig(name="zeros")),
        (r".*norm\.weight", InitializerConfig(name="ones")),
        (r"(position_)?embedding\.weight", config.embedding_init),
        (r"blocks\.\d+\.(attention\.qkv|ffn\.(input|gate))\.weight", config.input_init),
        (r"blocks\.\d+\.attention\.output\.weight", config.attention_output_init),
        (r"blocks\.\d+\.ffn\.output\.weight", config.ffn_output_init),
        (r"head\.weight", config.initializer),
    ):
        if re.fullmatch(pattern, name):
            return initializer
    raise AssertionError(f"no initializer for parameter {name}")


def learning_rate_scale(name: str, config: GPTConfig) -> float:
    """Factor on the learning rate of the parameter called `name`: 1 without muP.

    Under Adam a matrix whose inputs grow with the model learns more slowly by as much (arXiv:2203.03466,
    table 8).
    """
    if re.fullmatch(r"blocks\.\d+\.(attention\.(qkv|output)|ffn\.(input|gate))\.weight", name):
        return 1 / config.width_ratio
    if re.fullmatch(r"blocks\.\d+\.ffn\.output\.weight", name):
        return 1 / config.filter_ratio
    return 1.0
