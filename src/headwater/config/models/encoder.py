"""Bidirectional encoders (BERT, RoBERTa and ESM-2), and the models that are trained on top of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import FilePath, Section
from headwater.config.models.common import (
    AttentionKernel,
    InitializerConfig,
    Nonlinearity,
    Rate,
    SoftmaxInFP32,
    check_both_or_none,
    check_heads,
    first_given,
    growth,
    mup_logits_scale,
    with_defaults,
)


class LinformerConfig(Section):
    """`extra_attention_params` of `linformer`: the projection of keys and values along the sequence.

    Attributes:
        projected_length: number of keys and values after the projection.
        sharing: sharing of projections (arXiv:2006.04768, section 4): `headwise` uses one for the keys and
            another for the values of a layer, `key_value` one for both, `layerwise` one for all layers.
    """

    projected_length: int = Field(default=256, ge=1)
    sharing: Literal["headwise", "key_value", "layerwise"] = "layerwise"

    @property
    def initializer(self) -> InitializerConfig:
        """Initializer of the projections: the distribution that preserves lengths (theorem 2)."""
        return InitializerConfig(name="normal", std=self.projected_length**-0.5)


class EncoderSection(Section):
    """The keys of an encoder.

    Attributes:
        position_embedding_type: `learned`, `rotary` (arXiv:2104.09864), or null for none.
        mask_padding_in_positional_embed: give positions only to tokens that are not padding, starting from
            `pad_token_id` + 1 (RoBERTa).
        pad_token_id: id of the padding token.
        num_segments: number of segments that `token_type_ids` distinguish; 0 for none.
        rotary_dim: number of elements of each head that are rotated; all if absent.
        embedding_layer_norm: normalize the embeddings.
        norm_first: normalize the input of each part of a block (pre-norm), not the residual sum after it.
            Usually used with `use_final_layer_norm`, which normalizes the output of the last block.
        token_dropout: set the embeddings of masked tokens to 0, and scale the others by the fraction of
            unmasked tokens in training over that in the sample (ESM-2, the code of arXiv:2207.20827).
        mask_token_id: id of the masked token for `token_dropout`.
        encoder_nonlinearity: nonlinearity of the feed-forward parts.
        initializer_range: standard deviation of matrices without an initializer.
        symmetric_attention_init: start queries and keys with the same weights, so that each token attends to
            similar tokens from the start (after arXiv:2305.09828). Small models then learn sooner to compare
            two texts.
        mup_base_hidden_size: width at which the hyperparameters were tuned. It enables maximal update
            parametrization (muP, arXiv:2203.03466), and needs `mup_base_filter_size`.
        mup_base_filter_size: `filter_size` at which the hyperparameters were tuned.
        attention_module: `linformer` projects keys and values along the sequence to a fixed length, as set by
            `extra_attention_params`, so that the cost is linear in the length (arXiv:2006.04768).
        scale_qk_dot_by_d: divide attention scores by the head size instead of its square root.
        attention_logits_alpha: factor on attention scores.
        embeddings_scale: factor on the sum of the embeddings.
    """

    vocab_size: int = Field(default=30522, ge=1)
    hidden_size: int = Field(default=768, ge=1)
    max_position_embeddings: int = Field(default=512, ge=1)
    position_embedding_type: Literal["learned", "rotary"] | None = "learned"
    mask_padding_in_positional_embed: bool = False
    pad_token_id: int = Field(default=0, ge=0)
    num_segments: int = Field(default=2, ge=0)
    rotary_dim: int | None = Field(default=None, ge=2)
    rope_theta: float = Field(default=10000.0, gt=0)
    embedding_layer_norm: bool = True
    embedding_dropout_rate: Rate | None = None
    token_dropout: bool = False
    mask_token_id: int | None = Field(default=None, ge=0)

    num_hidden_layers: int = Field(default=12, ge=1)
    num_heads: int = Field(default=12, ge=1)
    filter_size: int = Field(default=3072, ge=1)
    encoder_nonlinearity: Nonlinearity = "gelu"
    dropout_rate: Rate = 0.1
    attention_dropout_rate: Rate | None = None
    layer_norm_epsilon: float = Field(default=1e-12, gt=0)
    norm_first: bool = False
    use_final_layer_norm: bool = False
    attention_module: Literal["aiayn_attention", "linformer"] = "aiayn_attention"
    extra_attention_params: LinformerConfig | None = None
    attention_softmax_fp32: SoftmaxInFP32 = True
    attention_kernel: AttentionKernel = None

    initializer_range: float = Field(default=0.02, gt=0)
    initializer: InitializerConfig | None = None
    symmetric_attention_init: bool = False

    mup_base_hidden_size: float | None = Field(default=None, gt=0)
    mup_base_filter_size: float | None = Field(default=None, gt=0)
    scale_qk_dot_by_d: bool = False
    attention_logits_alpha: float = Field(default=1.0, gt=0)
    embeddings_scale: float = 1.0

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        check_heads(self.hidden_size, self.num_heads)
        if self.token_dropout and self.mask_token_id is None:
            raise ValueError("token_dropout needs mask_token_id")
        return self

    @model_validator(mode="after")
    def _mup_needs_both_widths(self) -> Self:
        check_both_or_none(self, "mup_base_hidden_size", "mup_base_filter_size")
        return self

    @model_validator(mode="after")
    def _projected_keys(self) -> Self:
        if self.linformer is None:
            if self.extra_attention_params is not None:
                raise ValueError("extra_attention_params need attention_module: linformer")
        elif self.linformer.projected_length > self.max_position_embeddings:
            raise ValueError(
                "expected projected_length in extra_attention_params <= max_position_embeddings, "
                f"found {self.linformer.projected_length} and {self.max_position_embeddings}"
            )
        elif self.position_embedding_type == "rotary":
            raise ValueError(
                "attention_module linformer cannot be used with position_embedding_type rotary, because it "
                "sums keys over positions"
            )
        return self

    @property
    def linformer(self) -> LinformerConfig | None:
        """Projection of keys and values; `None` without one."""
        if self.attention_module != "linformer":
            return None
        return self.extra_attention_params or LinformerConfig()

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated."""
        return self.rotary_dim or self.head_size

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        divisor = self.head_size if self.scale_qk_dot_by_d else math.sqrt(self.head_size)
        return self.attention_logits_alpha / divisor

    @property
    def embedding_dropout(self) -> float:
        return first_given(self.embedding_dropout_rate, self.dropout_rate)

    @property
    def attention_dropout(self) -> float:
        return first_given(self.attention_dropout_rate, self.dropout_rate)

    @property
    def width_ratio(self) -> float:
        """`hidden_size` relative to the muP base; 1 without muP."""
        return growth(self.hidden_size, self.mup_base_hidden_size)

    @property
    def filter_ratio(self) -> float:
        """`filter_size` relative to the muP base; 1 without muP."""
        return growth(self.filter_size, self.mup_base_filter_size)

    @property
    def matrix_init(self) -> InitializerConfig:
        """Initializer of matrices, before muP."""
        return self.initializer or InitializerConfig(name="truncated_normal", std=self.initializer_range)


_ESM2: Mapping[str, Any] = {
    "norm_first": True,
    "use_final_layer_norm": True,
    "embedding_layer_norm": False,
    "num_segments": 0,
    "layer_norm_epsilon": 1e-5,
    "token_dropout": True,
}


class NamedEncoderSection(EncoderSection):
    """The keys of a model whose name sets the defaults of other keys."""

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_the_family(cls, data: Any) -> Any:
        return with_defaults(data, cls.defaults)


class BertConfig(NamedEncoderSection):
    """Pre-training by masked language modelling and next-sentence prediction.

    Attributes:
        name: `bert`, or `esm2` for protein language models (Science 379:1123). RoBERTa is a `bert` with
            `disable_nsp` and `mask_padding_in_positional_embed`.
        disable_nsp: train without next-sentence prediction.
        mlm_nonlinearity: nonlinearity in the head for masked tokens; `encoder_nonlinearity` if absent.
        pooler_nonlinearity: nonlinearity of the layer that reads the first token.
        share_embedding_weights: use the token embeddings as the last layer of the head.
        mlm_loss_scaling: divisor of the summed loss of the masked tokens: the batch size or their number.
        mlm_loss_weight: factor on the loss of the masked tokens.
        output_logits_alpha: with muP, a further factor on the logits.
    """

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"esm2": {**_ESM2, "disable_nsp": True}}

    name: Literal["bert", "esm2"]
    disable_nsp: bool = False
    mlm_nonlinearity: Nonlinearity | None = None
    pooler_nonlinearity: Nonlinearity = "tanh"
    share_embedding_weights: bool = True
    mlm_loss_scaling: Literal["batch_size", "num_masked"] = "batch_size"
    mlm_loss_weight: float = Field(default=1.0, gt=0)
    output_logits_alpha: float | None = Field(default=None, gt=0)

    @property
    def logits_scale(self) -> float:
        """Effective factor on the logits."""
        return mup_logits_scale(self.output_logits_alpha, self.hidden_size, self.mup_base_hidden_size)


class ClassifierConfig(NamedEncoderSection):
    """A classifier of texts, which reads the first token.

    Attributes:
        num_labels: number of classes.
        task_dropout: dropout rate before the last layer.
        name: `bert/classifier`, or `esm2/classifier` for proteins, with the encoder of `esm2`.
        problem_type: classification, or regression with mean squared error.
        compute_eval_metrics: compute the accuracy in evaluations.
    """

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"esm2/classifier": _ESM2}

    name: Literal["bert/classifier", "esm2/classifier"]
    num_labels: int = Field(default=2, ge=1)
    pooler_nonlinearity: Nonlinearity = "tanh"
    task_dropout: Rate = 0.1
    problem_type: Literal["single_label_classification", "regression"] = "single_label_classification"
    compute_eval_metrics: bool = True


class TokenClassifierConfig(EncoderSection):
    """A classifier of tokens.

    Attributes:
        num_classes: number of classes.
        encoder_output_dropout_rate: dropout rate before the last layer; `dropout_rate` if absent.
        include_padding_in_loss: include padding in the loss, with its class in the data.
        loss_weight: factor on the loss.
        label_vocab_file: JSON file with the names of the classes; the data loader has the same key.
        compute_eval_metrics: compute the accuracy of tokens in evaluations.
    """

    name: Literal["bert/token_classifier"]
    num_classes: int = Field(default=2, ge=1)
    pooler_nonlinearity: Nonlinearity = "tanh"
    encoder_output_dropout_rate: Rate | None = None
    include_padding_in_loss: bool = False
    loss_weight: float = Field(default=1.0, gt=0)
    label_vocab_file: FilePath | None = None
    compute_eval_metrics: bool = True

    @property
    def output_dropout(self) -> float:
        return first_given(self.encoder_output_dropout_rate, self.dropout_rate)


class ExtractiveSummarizationConfig(EncoderSection):
    """Extractive summarization: a classifier of sentences, which reads their first tokens (arXiv:1908.08345).

    Attributes:
        loss_weight: factor on the loss, which is the sum over sentences divided by the batch size.
        use_cls_bias: add a bias to the last layer.
        vocab_file: file with a token on each line; the data loader has the same key.
        compute_eval_metrics: compute the accuracy in evaluations.
    """

    name: Literal["bert/extractive_summarization"]
    pooler_nonlinearity: Nonlinearity = "tanh"
    loss_weight: float = Field(default=1.0, gt=0)
    use_cls_bias: bool = True
    vocab_file: FilePath | None = None
    compute_eval_metrics: bool = True


class QuestionAnsweringConfig(EncoderSection):
    """Extractive question answering: predicts the start and the end of the answer in a text.

    Attributes:
        max_answer_length: largest number of tokens of a predicted answer.
        compute_eval_metrics: compute accuracy and F1 of the answers in evaluations.
    """

    name: Literal["bert/qa"]
    pooler_nonlinearity: Nonlinearity = "tanh"
    max_answer_length: int = Field(default=30, ge=1)
    compute_eval_metrics: bool = True


class TowerConfig(EncoderSection):
    """One of the two encoders of `dpr`."""

    pooler_nonlinearity: Nonlinearity = "tanh"


class DPRConfig(Section):
    """Dense passage retrieval (arXiv:2004.04906), with separate encoders for questions and passages.

    Attributes:
        q_encoder: encoder of questions.
        ctx_encoder: encoder of passages.
        softmax_temperature: divisor of the dot products of questions and passages.
    """

    name: Literal["dpr"]
    q_encoder: TowerConfig
    ctx_encoder: TowerConfig
    softmax_temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _same_width(self) -> Self:
        if self.q_encoder.hidden_size != self.ctx_encoder.hidden_size:
            sizes = f"{self.q_encoder.hidden_size} and {self.ctx_encoder.hidden_size}"
            raise ValueError(f"expected the same hidden_size in q_encoder and ctx_encoder, found {sizes}")
        return self
