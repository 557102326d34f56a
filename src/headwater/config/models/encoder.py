"""Bidirectional encoders: BERT, RoBERTa and ESM-2, and what is trained on top of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import FilePath, NoEffect, Section
from headwater.config.models.common import InitializerConfig, Nonlinearity, Rate


class LinformerConfig(Section):
    """`extra_attention_params` of `linformer`: how keys and values are projected along the sequence.

    Attributes:
        projected_length: keys and values that are left of a sequence.
        sharing: what has one projection (arXiv:2006.04768, section 4): `headwise` the keys of a layer, and
            another one its values; `key_value` both of them; `layerwise` those of all layers.
    """

    projected_length: int = Field(default=256, ge=1)
    sharing: Literal["headwise", "key_value", "layerwise"] = "layerwise"

    @property
    def initializer(self) -> InitializerConfig:
        """Of the projections: the distribution for which lengths are kept (theorem 2)."""
        return InitializerConfig(name="normal", std=self.projected_length**-0.5)


class EncoderSection(Section):
    """The encoder itself.

    Rates and sizes that may be absent have a property that gives the value in force.

    Attributes:
        position_embedding_type: `learned`, or `rotary` (arXiv:2104.09864), or none.
        mask_padding_in_positional_embed: count positions of the tokens that are no padding, from
            `pad_token_id` + 1 on (RoBERTa).
        pad_token_id: the token that fills samples up.
        num_segments: kinds of segments that `token_type_ids` tell apart; 0: none.
        rotary_dim: elements of each head that are rotated; all where absent.
        embedding_layer_norm: normalize the embeddings.
        norm_first: normalize what a part of a block reads and not what it has added to; then the last output
            is normalized too (`use_final_layer_norm`).
        token_dropout: masked tokens have embedding 0, and the rest is scaled up as if as many were masked as
            in training (arXiv:2207.20827's code): ESM-2.
        mask_token_id: the masked token of `token_dropout`.
        encoder_nonlinearity: of the feed-forward parts.
        initializer_range: standard deviation of every matrix without an initializer.
        symmetric_attention_init: queries and keys begin with the same weights, so that each token attends to
            those like it from the start (after arXiv:2305.09828): small models soon compare two texts then.
        mup_base_hidden_size: width at which the hyperparameters were tuned; turns on maximal update
            parametrization (muP, arXiv:2203.03466). Needs `mup_base_filter_size` too.
        mup_base_filter_size: likewise of the feed-forward part.
        attention_module: `linformer` projects keys and values along the sequence to a fixed length, as
            `extra_attention_params` say, so that the cost grows as the length (arXiv:2006.04768).
        scale_qk_dot_by_d: divide attention scores by the head size and not by its root.
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
    attention_softmax_fp32: Annotated[bool, NoEffect("the softmax is always in fp32")] = True
    attention_kernel: Annotated[str | None, NoEffect("the kernel is chosen by torch")] = None

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
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_heads ({self.num_heads})"
            )
        if self.token_dropout and self.mask_token_id is None:
            raise ValueError("token_dropout needs mask_token_id")
        return self

    @model_validator(mode="after")
    def _mup_needs_both_widths(self) -> Self:
        if (self.mup_base_hidden_size is None) != (self.mup_base_filter_size is None):
            raise ValueError("mup_base_hidden_size and mup_base_filter_size come together or not at all")
        return self

    @model_validator(mode="after")
    def _projected_keys(self) -> Self:
        if self.linformer is None:
            if self.extra_attention_params is not None:
                raise ValueError("extra_attention_params are of attention_module: linformer")
        elif self.linformer.projected_length > self.max_position_embeddings:
            raise ValueError(
                f"projected_length ({self.linformer.projected_length}) is above max_position_embeddings "
                f"({self.max_position_embeddings})"
            )
        elif self.position_embedding_type == "rotary":
            raise ValueError("linformer adds up keys of all positions: none can be rotated by its own")
        return self

    @property
    def linformer(self) -> LinformerConfig | None:
        """How keys and values are projected; `None` where they are not."""
        if self.attention_module != "linformer":
            return None
        return self.extra_attention_params or LinformerConfig()

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return self.rotary_dim or self.head_size

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        divisor = self.head_size if self.scale_qk_dot_by_d else math.sqrt(self.head_size)
        return self.attention_logits_alpha / divisor

    @property
    def embedding_dropout(self) -> float:
        return self.dropout_rate if self.embedding_dropout_rate is None else self.embedding_dropout_rate

    @property
    def attention_dropout(self) -> float:
        return self.dropout_rate if self.attention_dropout_rate is None else self.attention_dropout_rate

    @property
    def width_ratio(self) -> float:
        """`hidden_size` relative to the muP base; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def filter_ratio(self) -> float:
        """`filter_size` relative to the muP base; 1 without muP."""
        return self.filter_size / (self.mup_base_filter_size or self.filter_size)

    @property
    def matrix_init(self) -> InitializerConfig:
        """Of every matrix, before muP."""
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
    """An encoder that trains by itself: its name chooses the values of keys that are left out."""

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_the_family(cls, data: Any) -> Any:
        return {**cls.defaults.get(str(data.get("name")), {}), **data} if isinstance(data, dict) else data


class BertConfig(NamedEncoderSection):
    """Pre-training by guessing masked tokens, and whether one text follows the other.

    Attributes:
        name: `esm2` is the encoder of protein language models (Science 379:1123), RoBERTa is a `bert` with
            `disable_nsp` and `mask_padding_in_positional_embed`.
        disable_nsp: train on masked tokens alone.
        mlm_nonlinearity: between the two layers that guess a token; `encoder_nonlinearity` where absent.
        pooler_nonlinearity: of the layer that reads the first token.
        share_embedding_weights: tokens are guessed by their embeddings.
        mlm_loss_scaling: what the summed loss of the masked tokens is divided by.
        mlm_loss_weight: factor on the loss of the masked tokens.
        output_logits_alpha: with muP, factor on the logits beside the width ratio.
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
        """Factor on the logits in force."""
        alpha = 1.0 if self.output_logits_alpha is None else self.output_logits_alpha
        return alpha / self.width_ratio if self.mup_base_hidden_size is not None else 1.0


class ClassifierConfig(NamedEncoderSection):
    """A class for each text, read off its first token.

    Attributes:
        num_labels: classes.
        task_dropout: rate before the last layer.
        name: `esm2/classifier` reads proteins by the encoder of `esm2`.
        problem_type: a class, or a number (mean squared error).
        compute_eval_metrics: accuracy besides the loss.
    """

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"esm2/classifier": _ESM2}

    name: Literal["bert/classifier", "esm2/classifier"]
    num_labels: int = Field(default=2, ge=1)
    pooler_nonlinearity: Nonlinearity = "tanh"
    task_dropout: Rate = 0.1
    problem_type: Literal["single_label_classification", "regression"] = "single_label_classification"
    compute_eval_metrics: bool = True


class TokenClassifierConfig(EncoderSection):
    """A class for each token.

    Attributes:
        num_classes: classes.
        encoder_output_dropout_rate: rate before the last layer; `dropout_rate` where absent.
        include_padding_in_loss: padding counts, with the class that the data give it.
        loss_weight: factor on the loss.
        label_vocab_file: names of the classes, JSON; the data have it too.
        compute_eval_metrics: accuracy of the tokens besides the loss.
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
        rate = self.encoder_output_dropout_rate
        return self.dropout_rate if rate is None else rate


class ExtractiveSummarizationConfig(EncoderSection):
    """Whether each sentence belongs to the summary, read off the token that begins it (arXiv:1908.08345).

    Attributes:
        loss_weight: factor on the summed loss of the sentences, over the batch size.
        use_cls_bias: the last layer has a bias.
        vocab_file: tokens, one a line; the data have it too.
        compute_eval_metrics: accuracy besides the loss.
    """

    name: Literal["bert/extractive_summarization"]
    pooler_nonlinearity: Nonlinearity = "tanh"
    loss_weight: float = Field(default=1.0, gt=0)
    use_cls_bias: bool = True
    vocab_file: FilePath | None = None
    compute_eval_metrics: bool = True


class QuestionAnsweringConfig(EncoderSection):
    """Where the answer to a question begins and ends in a text.

    Attributes:
        max_answer_length: tokens of an answer at most, where the best one is sought.
        compute_eval_metrics: accuracy and F1 of the answers besides the loss.
    """

    name: Literal["bert/qa"]
    pooler_nonlinearity: Nonlinearity = "tanh"
    max_answer_length: int = Field(default=30, ge=1)
    compute_eval_metrics: bool = True


class TowerConfig(EncoderSection):
    """One of the two encoders of `dpr`."""

    pooler_nonlinearity: Nonlinearity = "tanh"


class DPRConfig(Section):
    """Dense passage retrieval (arXiv:2004.04906): questions and passages, each by an encoder of its own.

    Attributes:
        q_encoder: of questions.
        ctx_encoder: of passages.
        softmax_temperature: divides the products of questions and passages.
    """

    name: Literal["dpr"]
    q_encoder: TowerConfig
    ctx_encoder: TowerConfig
    softmax_temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _same_width(self) -> Self:
        if self.q_encoder.hidden_size != self.ctx_encoder.hidden_size:
            raise ValueError("q_encoder and ctx_encoder differ in hidden_size, and are compared by product")
        return self
