"""Encoder-decoders: T5 (arXiv:1910.10683) and the original transformer (arXiv:1706.03762)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import NoEffect, Section
from headwater.config.models.common import (
    AttentionKernel,
    Nonlinearity,
    Rate,
    SoftmaxInFP32,
    check_both_or_none,
    first_given,
    growth,
    with_defaults,
)

StackName = Literal["encoder", "decoder"]

SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {},
    "transformer": {
        "position_embedding_type": "fixed",
        "norm_type": "layernorm",
        "relu_dropout_rate": 0.0,
        "use_ffn_bias": True,
        "use_pre_encoder_decoder_layer_norm": False,
        "use_dropout_outside_residual_path": False,
        "use_transformer_initialization": True,
    },
}
"""Defaults of keys, by the family's name."""


class Seq2SeqConfig(Section):
    """A model that reads one text and generates another.

    Attributes:
        name: the family, which sets the defaults of other keys.
        src_vocab_size: size of the encoder's vocabulary without `extra_ids`.
        tgt_vocab_size: size of the decoder's vocabulary without `extra_ids`; that of the encoder if absent.
        extra_ids: number of further token ids at the top of both vocabularies, which stand for spans of text.
        share_encoder_decoder_embedding: use the same embedding in encoder and decoder.
        share_embedding_weights: use the decoder's embedding as the head.
        embeddings_alpha: factor on the embeddings. With muP they are also multiplied by the square root of
            `d_model`.
        position_embedding_type: `relative` (arXiv:1910.10683, section 2.1), `fixed` (arXiv:1706.03762,
            section 3.5), `learned_absolute`, or null for none.
        relative_attention_num_buckets: number of distances that `relative` distinguishes.
        relative_attention_max_distance: all distances from this one on are treated as equal.
        src_max_position_embeddings: largest number of tokens of an input text.
        tgt_max_position_embeddings: largest number of tokens of an output text.
        d_model: width: number of values at each position.
        d_kv: width of a head.
        d_ff: width of the hidden layer of the feed-forward part.
        encoder_num_hidden_layers: number of the encoder's layers.
        decoder_num_hidden_layers: number of the decoder's layers; that of the encoder if absent.
        decoder_nonlinearity: nonlinearity of the decoder; that of the encoder if absent.
        relu_dropout_rate: dropout rate after the nonlinearity; `dropout_rate` if absent.
        use_pre_encoder_decoder_layer_norm: normalize the input of each part of a block (pre-norm), not
            the residual sum after it.
        use_dropout_outside_residual_path: also apply dropout to the outputs of encoder and decoder.
        use_transformer_initialization: use Xavier initializers, and divide attention scores by the square
            root of the head size. Otherwise, as in T5, the queries' weights are initialized smaller.
        initializer_factor: factor on the standard deviation of T5's initializers.
        decoder_start_token_id: id of the token with which a generated text starts.
        pad_token_id: id of the padding token; also the start token if `decoder_start_token_id` is absent.
        label_smoothing: fraction of each label that is spread over all tokens in training
            (arXiv:1512.00567, section 7).
        mlm_loss_scaling: divisor of the summed cross-entropy: the number of labels (`num_masked`) or of
            samples (`batch_size`). With `precomputed_num_masked` it is the number of samples too, and the
            field `loss_weight` of the batch, if there is one, replaces `lm_loss_weight`.
        lm_loss_weight: factor on the loss if it is divided by the number of samples; usually 1 / number of
            labels per sample.
        mup_base_d_model: width at which the hyperparameters were tuned. It enables maximal update
            parametrization (muP, arXiv:2203.03466), and needs `mup_base_d_ff`.
        mup_base_d_ff: `d_ff` at which the hyperparameters were tuned.
        mup_base_d_kv: `d_kv` at which the hyperparameters were tuned, if it also grows.
        encoder_attention_logits_alpha: factor on the encoder's attention scores.
        decoder_attention_logits_alpha: factor on the decoder's attention scores.
        scale_encoder_qk_dot_by_d: divide the encoder's attention scores by the head size instead of its
            square root; if absent, true with muP.
        scale_decoder_qk_dot_by_d: the same for the decoder.
        scale_output_logits_by_d: with muP, divide the logits by the width ratio instead of its square root.
        output_logits_alpha: with muP, a factor on the logits.
    """

    name: Literal["t5", "transformer"]

    # embedding
    src_vocab_size: int = Field(default=32001, ge=1)
    tgt_vocab_size: int | None = Field(default=None, ge=1)
    extra_ids: int = Field(default=0, ge=0)
    share_encoder_decoder_embedding: bool = True
    share_embedding_weights: bool = True
    embeddings_alpha: float = Field(default=1.0, gt=0)
    position_embedding_type: Literal["relative", "fixed", "learned_absolute"] | None = "relative"
    relative_attention_num_buckets: int = Field(default=32, ge=4, multiple_of=4)
    relative_attention_max_distance: int = Field(default=128, ge=2)
    src_max_position_embeddings: int = Field(default=512, ge=1)
    tgt_max_position_embeddings: int = Field(default=512, ge=1)

    # blocks
    d_model: int = Field(default=512, ge=1)
    d_kv: int = Field(default=64, ge=1)
    d_ff: int = Field(default=2048, ge=1)
    num_heads: int = Field(default=8, ge=1)
    encoder_num_hidden_layers: int = Field(default=6, ge=1)
    decoder_num_hidden_layers: int | None = Field(default=None, ge=1)
    encoder_nonlinearity: Nonlinearity = "relu"
    decoder_nonlinearity: Nonlinearity | None = None
    norm_type: Literal["layernorm", "biasless-layernorm", "rmsnorm"] = "rmsnorm"
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    dropout_rate: Rate = 0.1
    relu_dropout_rate: Rate | None = None
    use_projection_bias_in_attention: bool = False
    use_ffn_bias: bool = False
    use_pre_encoder_decoder_layer_norm: bool = True
    use_pre_encoder_decoder_dropout: Annotated[
        bool, NoEffect("dropout is always applied once to the embeddings")
    ] = False
    use_dropout_outside_residual_path: bool = True
    attention_softmax_fp32: SoftmaxInFP32 = True
    attention_kernel: AttentionKernel = None

    # initial values, loss, generation
    use_transformer_initialization: bool = False
    initializer_factor: float = Field(default=1.0, gt=0)
    label_smoothing: Rate = 0.0
    mlm_loss_scaling: Literal["num_masked", "precomputed_num_masked", "batch_size"] = "batch_size"
    lm_loss_weight: float = Field(default=1.0, gt=0)
    compute_eval_metrics: bool = True
    pad_token_id: int = Field(default=0, ge=0)
    decoder_start_token_id: int | None = Field(default=None, ge=0)

    # muP
    mup_base_d_model: float | None = Field(default=None, gt=0)
    mup_base_d_ff: float | None = Field(default=None, gt=0)
    mup_base_d_kv: float | None = Field(default=None, gt=0)
    encoder_attention_logits_alpha: float = Field(default=1.0, gt=0)
    decoder_attention_logits_alpha: float = Field(default=1.0, gt=0)
    scale_encoder_qk_dot_by_d: bool | None = None
    scale_decoder_qk_dot_by_d: bool | None = None
    scale_output_logits_by_d: bool = False
    output_logits_alpha: float = Field(default=1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _of_the_family(cls, data: Any) -> Any:
        return with_defaults(data, SEQ2SEQ)

    @model_validator(mode="after")
    def _vocabularies_fit(self) -> Self:
        if self.share_encoder_decoder_embedding and self.source_tokens != self.target_tokens:
            raise ValueError(
                "share_encoder_decoder_embedding needs equal src_vocab_size and tgt_vocab_size, "
                f"found {self.src_vocab_size} and {self.tgt_vocab_size}"
            )
        return self

    @model_validator(mode="after")
    def _buckets_fit(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError(
                "expected relative_attention_max_distance > relative_attention_num_buckets / 2, found "
                f"{self.relative_attention_max_distance} and {self.relative_attention_num_buckets}"
            )
        return self

    @model_validator(mode="after")
    def _mup_is_whole(self) -> Self:
        check_both_or_none(self, "mup_base_d_model", "mup_base_d_ff")
        if self.mup_base_d_kv is not None and not self.is_mup:
            raise ValueError("mup_base_d_kv needs mup_base_d_model and mup_base_d_ff")
        if self.is_mup and self.use_transformer_initialization:
            raise ValueError(
                "use_transformer_initialization cannot be used with mup_base_d_model: muP has initializers"
            )
        return self

    # sizes

    @property
    def source_tokens(self) -> int:
        """Number of rows of the encoder's embedding."""
        return self.src_vocab_size + self.extra_ids

    @property
    def target_tokens(self) -> int:
        """Number of rows of the decoder's embedding and of the head."""
        return (self.tgt_vocab_size or self.src_vocab_size) + self.extra_ids

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.d_kv

    @property
    def ffn_dropout(self) -> float:
        """Dropout rate after the nonlinearity."""
        return first_given(self.relu_dropout_rate, self.dropout_rate)

    @property
    def start_token_id(self) -> int:
        """Id of the start token of output texts."""
        return first_given(self.decoder_start_token_id, self.pad_token_id)

    def num_layers(self, stack: StackName) -> int:
        """Return the number of blocks of the encoder or the decoder."""
        given = None if stack == "encoder" else self.decoder_num_hidden_layers
        return first_given(given, self.encoder_num_hidden_layers)

    def max_length(self, stack: StackName) -> int:
        """Return the largest number of tokens that the encoder or the decoder reads."""
        return self.src_max_position_embeddings if stack == "encoder" else self.tgt_max_position_embeddings

    def nonlinearity(self, stack: StackName) -> Nonlinearity:
        """Return the nonlinearity of the feed-forward parts of the encoder or the decoder."""
        given = None if stack == "encoder" else self.decoder_nonlinearity
        return first_given(given, self.encoder_nonlinearity)

    # scales

    @property
    def is_mup(self) -> bool:
        return self.mup_base_d_model is not None

    @property
    def width_ratio(self) -> float:
        """`d_model` relative to the muP base; 1 without muP."""
        return growth(self.d_model, self.mup_base_d_model)

    @property
    def filter_ratio(self) -> float:
        """`d_ff` relative to the muP base; 1 without muP."""
        return growth(self.d_ff, self.mup_base_d_ff)

    @property
    def head_ratio(self) -> float:
        """`d_kv` relative to the muP base `mup_base_d_kv`; 1 if that is not set."""
        return growth(self.d_kv, self.mup_base_d_kv)

    @property
    def embeddings_scale(self) -> float:
        """Effective factor on the embeddings."""
        return self.embeddings_alpha * (math.sqrt(self.d_model) if self.is_mup else 1.0)

    @property
    def logits_scale(self) -> float:
        """Factor on the logits. Without muP: 1/√d_model if head and embedding share weights, otherwise 1."""
        if self.is_mup:
            ratio = self.width_ratio
            return self.output_logits_alpha / (ratio if self.scale_output_logits_by_d else math.sqrt(ratio))
        return self.d_model**-0.5 if self.share_embedding_weights else 1.0

    def attention_scale(self, stack: StackName) -> float:
        """Return the factor on the product of query and key in the encoder or the decoder."""
        encoder = stack == "encoder"
        alpha = self.encoder_attention_logits_alpha if encoder else self.decoder_attention_logits_alpha
        if not (self.is_mup or self.use_transformer_initialization):
            return alpha
        given = self.scale_encoder_qk_dot_by_d if encoder else self.scale_decoder_qk_dot_by_d
        by_size = first_given(given, self.is_mup)
        # If only d_model grows, queries and keys are each divided by the square root of the ratio.
        growth = self.width_ratio if self.mup_base_d_kv is None else 1.0
        return alpha / (self.d_kv if by_size else math.sqrt(self.d_kv)) / growth
