"""Decoder-only language models: a single schema. A family sets the defaults of its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import NoEffect, Section
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
from headwater.config.models.lora import LoRAConfig


class KeyValueConfig(Section):
    """`extra_attention_params` of multi-query attention.

    Attributes:
        num_kv_groups: number of heads of keys and values; queries share them.
    """

    num_kv_groups: int = Field(default=1, ge=1)


class FeedForwardPartConfig(Section):
    """`extra_ffn_params`: settings of the feed-forward part.

    Attributes:
        static_dual_expert: only false is supported.
    """

    static_dual_expert: Literal[False] = False


class RopeScalingConfig(Section):
    """`pos_scaling_extra_args`: further settings of the scaling of rotary positions.

    Attributes:
        original_max_position_embeddings: longest sequence of the pre-training.
        low_freq_factor: with `llama3`, wavelengths above `original_max_position_embeddings` divided by this
            are scaled.
        high_freq_factor: with `llama3`, wavelengths below `original_max_position_embeddings` divided by this
            stay the same.
        beta_fast: with `yarn`, pairs with more rotations than this in the original length stay the same.
        beta_slow: with `yarn`, pairs with fewer rotations than this in the original length are scaled.
        attention_factor: with `yarn`, factor on queries and keys; computed from the scaling if absent.
    """

    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    low_freq_factor: float | None = Field(default=None, gt=0)
    high_freq_factor: float | None = Field(default=None, gt=0)
    beta_fast: float | None = Field(default=None, gt=0)
    beta_slow: float | None = Field(default=None, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)


class MoEConfig(Section):
    """A mixture of experts that replaces the feed-forward part.

    Attributes:
        num_experts: number of experts from which the router chooses for each token.
        top_k: number of experts that are chosen for each token.
        num_shared_experts: number of further experts that process every token.
        load_balancing_loss_coef: weight of the load-balancing loss (arXiv:2101.03961, equation 4).
        null_expert_bias: with `top_k` 1, the logit of a null expert whose output is 0. It takes a part of the
            probability, so that the weight of the chosen expert can grow.
        router_fp32: has no effect: the router is always computed in fp32.
        routing_algorithm: `learned` is the only algorithm.
    """

    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    num_shared_experts: int = Field(default=0, ge=0)
    load_balancing_loss_coef: float = Field(default=0.0, ge=0)
    null_expert_bias: float | None = None
    router_fp32: bool = True
    routing_algorithm: Literal["learned"] = "learned"

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"expected top_k <= num_experts, found {self.top_k} and {self.num_experts}")
        if self.null_expert_bias is not None and self.top_k != 1:
            raise ValueError(f"null_expert_bias needs top_k 1, found {self.top_k}")
        return self


_BIASES = ("use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias")
_NO_BIAS = dict.fromkeys(_BIASES, False)
_GPTJ = {
    "position_embedding_type": "rotary",
    "rotary_style": "interleaved",
    "rotary_dim": 64,
    "parallel_blocks": True,
    "share_embedding_weights": False,
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_bias_in_output": True,
    "dropout_rate": 0.0,
}
_LLAMA = {
    "position_embedding_type": "rotary",
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "share_embedding_weights": False,
    "dropout_rate": 0.0,
    **_NO_BIAS,
}
_BIGCODE = {"attention_module": "multiquery_attention", "nonlinearity": "gelu"}
_MUP_ALIBI = {"position_embedding_type": "alibi", "nonlinearity": "swiglu", "dropout_rate": 0.0}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "gpt3": {},
    "gptj": _GPTJ,
    "gpt-neox": {
        "position_embedding_type": "rotary",
        "parallel_blocks": True,
        "use_untied_layer_norm": True,
        "share_embedding_weights": False,
        "dropout_rate": 0.0,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "gemma2": {
        **_LLAMA,
        "nonlinearity": "geglu",
        "share_embedding_weights": True,
        "norm_first_sandwich": True,
        "norm_unit_offset": True,
        "layer_norm_epsilon": 1e-6,
        "attention_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_every_other_decoder_layer": True,
    },
    "falcon": {
        "position_embedding_type": "rotary",
        "attention_module": "multiquery_attention",
        "parallel_blocks": True,
        "dropout_rate": 0.0,
        **_NO_BIAS,
    },
    "bloom": {
        "position_embedding_type": "alibi",
        "embedding_layer_norm": True,
        "nonlinearity": "gelu_new",
        "dropout_rate": 0.0,
    },
    "mpt": {
        "position_embedding_type": "alibi",
        "norm_type": "biasless-layernorm",
        "dropout_rate": 0.0,
        **_NO_BIAS,
    },
    "btlm": _MUP_ALIBI,
    "jais": _MUP_ALIBI,
    "codegen": {**_GPTJ, "nonlinearity": "gelu_new"},
    "santacoder": _BIGCODE,
    "starcoder": _BIGCODE,
}
"""Defaults of keys, by the family's name."""


class DecoderConfig(Section):
    """A decoder-only language model.

    Attributes:
        name: the family, which sets the defaults of other keys.
        position_embedding_type: `learned`, `fixed` (sinusoidal, arXiv:1706.03762), `rotary`
            (arXiv:2104.09864), `alibi` (arXiv:2108.12409), or null for none.
        rotary_dim: number of elements of each head that are rotated; all if absent.
        rotary_style: pairs of elements that are rotated together: `interleaved` for neighbours (GPT-J), or
            `half` for elements of the first and second half (GPT-NeoX).
        rope_theta: base of the wavelengths of rotary positions.
        pos_scaling_type: scaling of rotary positions beyond the length of pre-training: `linear`
            (arXiv:2306.15595), `ntk`, `yarn` (arXiv:2309.00071), `llama3`.
        pos_scaling_factor: factor of this scaling.
        pos_scaling_extra_args: further settings of this scaling.
        alibi_trainable_slopes: train the slopes of ALiBi.
        embedding_layer_norm: normalize the embeddings.
        norm_type: `layernorm`, `biasless-layernorm` or `rmsnorm` (arXiv:1910.07467).
        norm_unit_offset: normalization layers multiply by 1 + weight.
        norm_first_sandwich: also normalize the output of each part of a block.
        parallel_blocks: attention and feed-forward part read the same input, to which both outputs are added.
        use_untied_layer_norm: in parallel blocks, use separate normalization layers for the two parts.
        attention_module: with `multiquery_attention`, several query heads share a head of keys and values, as
            set by `extra_attention_params` (arXiv:1911.02150, arXiv:2305.13245).
        attention_inner_dim: width of all heads together; `hidden_size` if absent.
        attention_type: `dot_product` does not divide scores by the square root of the head size.
        attention_logits_alpha: factor on attention scores.
        attention_logit_softcapping: `c` in `c·tanh(s/c)`, which replaces each score `s` (arXiv:2408.00118,
            section 2).
        attention_sliding_window_length: largest number of keys that a query attends to, including its own.
        attention_sink_tokens: number of first tokens to which every query also attends (arXiv:2309.17453).
        sliding_window_every_other_decoder_layer: only the layers 0, 2, 4, … have a window.
        scale_qk_dot_by_layer_idx: divide attention scores by the number of the layer, from 1.
        final_logit_softcapping: `c` in `c·tanh(s/c)`, which replaces each logit `s`.
        filter_size: width of the hidden layer of the feed-forward part; 4 · `hidden_size` if absent.
        residual_dropout_rate: another name of `dropout_rate`.
        moe: a mixture of experts that replaces the feed-forward part.
        initializer_range: standard deviation of matrices without an initializer.
        initializer: initializer of matrices for which there is no other one.
        embedding_initializer: initializer of token and position embeddings; `initializer` if absent.
        output_layer_initializer: initializer of the matrices whose output is added to the residual stream; if
            absent, `initializer` with its standard deviation divided by the square root of twice the number
            of layers (GPT-2 paper, section 2.3).
        loss_scaling: divisor of the summed cross-entropy: the number of tokens or the batch size.
        loss_weight: factor on the loss if `loss_scaling` is `batch_size`, usually 1 / sequence length.
        mup_base_hidden_size: width at which the hyperparameters were tuned. It enables maximal update
            parametrization (muP, arXiv:2203.03466) as in the Cerebras-GPT paper (arXiv:2304.03208, appendix
            G), and needs `mup_base_filter_size`.
        mup_base_filter_size: `filter_size` at which the hyperparameters were tuned.
        scale_qk_dot_by_d: divide attention scores by the head size instead of its square root.
        output_logits_alpha: further factor on the logits with muP.
        output_logits_scale: factor on the logits, which replaces that of muP.
        embeddings_scale: factor on the sum of the embeddings.
        lora_params: low-rank adapters; if present, only the adapters are trained.
    """

    name: Literal[
        "gpt2", "gpt3", "gptj", "gpt-neox", "llama", "mistral", "mixtral", "gemma2", "falcon", "bloom", "mpt",
        "btlm", "jais", "codegen", "santacoder", "starcoder",
    ] = "gpt2"  # fmt: skip

    # embedding
    vocab_size: int = Field(default=50257, ge=1)
    hidden_size: int = Field(default=768, ge=1)
    max_position_embeddings: int = Field(default=1024, ge=1)
    position_embedding_type: Literal["learned", "fixed", "rotary", "alibi"] | None = "learned"
    rotary_dim: int | None = Field(default=None, ge=2)
    rotary_style: Literal["interleaved", "half"] = "half"
    rope_theta: float = Field(default=10000.0, gt=0)
    pos_scaling_type: Literal["linear", "ntk", "yarn", "llama3"] | None = None
    pos_scaling_factor: float = Field(default=1.0, gt=0)
    pos_scaling_extra_args: RopeScalingConfig = RopeScalingConfig()
    alibi_trainable_slopes: bool = False
    share_embedding_weights: bool = True
    embedding_layer_norm: bool = False
    embedding_dropout_rate: Rate | None = None

    # blocks
    num_hidden_layers: int = Field(default=12, ge=1)
    dropout_rate: Rate = 0.1
    residual_dropout_rate: Rate | None = None
    norm_type: Literal["layernorm", "biasless-layernorm", "rmsnorm"] = "layernorm"
    norm_unit_offset: bool = False
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    norm_first_sandwich: bool = False
    parallel_blocks: bool = False
    use_untied_layer_norm: bool = False

    # attention
    num_heads: int = Field(default=12, ge=1)
    attention_module: Literal["aiayn_attention", "multiquery_attention"] = "aiayn_attention"
    extra_attention_params: KeyValueConfig = KeyValueConfig()
    attention_inner_dim: int | None = Field(default=None, ge=1)
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_dropout_rate: Rate | None = None
    attention_logits_alpha: float = Field(default=1.0, gt=0)
    attention_logit_softcapping: float | None = Field(default=None, gt=0)
    attention_sliding_window_length: int | None = Field(default=None, ge=1)
    attention_sink_tokens: int = Field(default=0, ge=0)
    sliding_window_every_other_decoder_layer: bool = False
    scale_qk_dot_by_layer_idx: bool = False
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    attention_softmax_fp32: SoftmaxInFP32 = True
    attention_kernel: AttentionKernel = None
    boundary_casting: Annotated[bool, NoEffect("autocast selects the operations to cast")] = False

    # feed-forward part
    filter_size: int | None = Field(default=None, ge=1)
    nonlinearity: Nonlinearity = "gelu"
    use_ffn_bias: bool = True
    moe: MoEConfig | None = None
    extra_ffn_params: Annotated[
        FeedForwardPartConfig, NoEffect("there is only one kind of feed-forward part")
    ] = FeedForwardPartConfig()

    # output, initial values, loss
    use_bias_in_output: bool = False
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    initializer: InitializerConfig | None = None
    embedding_initializer: InitializerConfig | None = None
    output_layer_initializer: InitializerConfig | None = None
    loss_scaling: Literal["num_tokens", "batch_size"] = "num_tokens"
    loss_weight: float = Field(default=1.0, gt=0)

    # muP
    mup_base_hidden_size: float | None = Field(default=None, gt=0)
    mup_base_filter_size: float | None = Field(default=None, gt=0)
    scale_qk_dot_by_d: bool = False
    output_logits_alpha: float | None = Field(default=None, gt=0)
    output_logits_scale: float | None = Field(default=None, gt=0)
    embeddings_scale: float = 1.0

    lora_params: LoRAConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_family(cls, data: Any) -> Any:
        return with_defaults(data, FAMILIES, "gpt2")

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        key = "hidden_size" if self.attention_inner_dim is None else "attention_inner_dim"
        check_heads(self.inner_size, self.num_heads, key)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_groups ({self.num_kv_heads})"
            )
        if self.position_embedding_type == "rotary" and (
            self.rotary_size % 2 or self.rotary_size > self.head_size
        ):
            raise ValueError(
                f"expected an even rotary_dim <= the head size {self.head_size}, found {self.rotary_size}"
            )
        return self

    @model_validator(mode="after")
    def _mup_needs_both_widths(self) -> Self:
        check_both_or_none(self, "mup_base_hidden_size", "mup_base_filter_size")
        return self

    @model_validator(mode="after")
    def _one_dropout_rate(self) -> Self:
        given = self.model_fields_set
        if {
            "dropout_rate",
            "residual_dropout_rate",
        } <= given and self.dropout_rate != self.residual_dropout_rate:
            raise ValueError(
                "dropout_rate and residual_dropout_rate name the same rate, but have different values"
            )
        return self

    # attention

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.attention_inner_dim or self.hidden_size

    @property
    def head_size(self) -> int:
        return self.inner_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        shared = self.attention_module == "multiquery_attention"
        return self.extra_attention_params.num_kv_groups if shared else self.num_heads

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated."""
        return self.rotary_dim or self.head_size

    def attention_scale(self, layer: int) -> float:
        """Return the factor on the product of query and key in a layer, numbered from 0."""
        scale = self.attention_logits_alpha / (layer + 1 if self.scale_qk_dot_by_layer_idx else 1)
        if self.attention_type == "dot_product":
            return scale
        return scale / (self.head_size if self.scale_qk_dot_by_d else math.sqrt(self.head_size))

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer: a number of keys, or `None` for all previous keys."""
        if self.sliding_window_every_other_decoder_layer and layer % 2:
            return None
        return self.attention_sliding_window_length

    # feed-forward part, dropout, muP, initial values

    @property
    def ffn_size(self) -> int:
        """Width of the hidden layer of the feed-forward part."""
        return self.filter_size or 4 * self.hidden_size

    @property
    def residual_dropout(self) -> float:
        """Dropout rate of the outputs of attention and of the feed-forward part."""
        return first_given(self.residual_dropout_rate, self.dropout_rate)

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
        """`ffn_size` relative to the muP base; 1 without muP."""
        return growth(self.ffn_size, self.mup_base_filter_size)

    @property
    def logits_scale(self) -> float:
        """Effective factor on the logits."""
        if self.output_logits_scale is not None:
            return self.output_logits_scale
        return mup_logits_scale(self.output_logits_alpha, self.hidden_size, self.mup_base_hidden_size)

    @property
    def matrix_init(self) -> InitializerConfig:
        """Initializer of the matrices that have no key for an initializer, before muP scales it."""
        return self.initializer or InitializerConfig(name="truncated_normal", std=self.initializer_range)
