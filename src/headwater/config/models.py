"""What a `model:` section may say, for every model family: one class each, found by the model's name."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import Section

Nonlinearity = Literal[
    "gelu", "gelu_new", "quick_gelu", "relu", "squared_relu", "silu", "tanh",
    "swiglu", "geglu", "geglu_new", "reglu",
]  # fmt: skip
InitializerName = Literal[
    "normal", "truncated_normal", "uniform", "xavier_normal", "xavier_uniform", "constant", "zeros", "ones"
]


class InitializerConfig(Section):
    """How a weight is drawn at the start.

    Attributes:
        name: the distribution. `truncated_normal` draws from a normal and redraws outside [`a`, `b`].
        mean: of the normal ones.
        std: of the normal ones.
        a: lower bound of `uniform` and `truncated_normal` (there `mean - 2 std` where absent).
        b: upper bound, likewise.
        gain: factor on the spread of the `xavier_*` ones.
        value: what `constant` fills in.
    """

    name: InitializerName
    mean: float = 0.0
    std: float = Field(default=1.0, ge=0)
    a: float | None = None
    b: float | None = None
    gain: float = 1.0
    value: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of `uniform` and `truncated_normal`."""
        if self.name == "uniform":
            low, high = 0.0, 1.0
        else:
            low, high = self.mean - 2 * self.std, self.mean + 2 * self.std
        return (low if self.a is None else self.a), (high if self.b is None else self.b)

    def scaled(self, factor: float) -> InitializerConfig:
        """The same distribution with its spread multiplied by `factor`."""
        if factor == 1:
            return self
        update: dict[str, float] = {"std": self.std * factor, "gain": self.gain * factor}
        if self.name in ("uniform", "truncated_normal"):
            low, high = self.bounds
            centre = self.mean if self.name == "truncated_normal" else (low + high) / 2
            update |= {"a": centre + (low - centre) * factor, "b": centre + (high - centre) * factor}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"a ({low}) is above b ({high})")
        return self


class GPTConfig(Section):
    """A GPT-2 or GPT-3 style decoder.

    Rates and sizes that may be absent have a property that gives the value in force.

    Attributes:
        embedding_dropout_rate: dropout after the embeddings; `dropout_rate` where absent.
        attention_dropout_rate: dropout on the attention weights; `dropout_rate` where absent.
        attention_type: `dot_product` leaves out the division by the root of the head size.
        filter_size: width between the two layers of the feed-forward part; 4 `hidden_size` where absent.
        use_projection_bias_in_attention: bias of the query, key and value projections.
        use_ffn_bias_in_attention: bias of the attention's output projection.
        use_bias_in_output: bias of the language-model head.
        initializer: of every weight matrix that has none of its own.
        embedding_initializer: of token and position embeddings; `initializer` where absent.
        output_layer_initializer: of the matrices that write into the residual stream; where absent
            `initializer` with its spread divided by the root of twice the number of layers
            (GPT-2 paper, section 2.3).
        loss_scaling: what the summed cross-entropy is divided by.
        loss_weight: factor on the loss where `loss_scaling` is `batch_size`, usually 1 / sequence length.
        mup_base_hidden_size: width at which the hyperparameters were tuned; turns on maximal update
            parametrization (muP, arXiv:2203.03466), in the form of the Cerebras-GPT paper (arXiv:2304.03208,
            appendix G). Needs `mup_base_filter_size` too.
        mup_base_filter_size: likewise of the feed-forward part.
        scale_qk_dot_by_d: divide attention scores by the head size and not by its root.
        output_logits_alpha: factor on the logits, on top of the muP width ratio.
        embeddings_scale: factor on the sum of the embeddings.
    """

    name: Literal["gpt2", "gpt3"] = "gpt2"

    vocab_size: int = Field(default=50257, ge=1)
    hidden_size: int = Field(default=768, ge=1)
    position_embedding_type: Literal["learned"] = "learned"
    max_position_embeddings: int = Field(default=1024, ge=1)
    share_embedding_weights: bool = True
    embedding_dropout_rate: float | None = Field(default=None, ge=0, lt=1)

    num_hidden_layers: int = Field(default=12, ge=1)
    dropout_rate: float = Field(default=0.1, ge=0, lt=1)
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)

    num_heads: int = Field(default=12, ge=1)
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_dropout_rate: float | None = Field(default=None, ge=0, lt=1)
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True

    filter_size: int | None = Field(default=None, ge=1)
    nonlinearity: Nonlinearity = "gelu"
    use_ffn_bias: bool = True

    use_bias_in_output: bool = False
    initializer: InitializerConfig = InitializerConfig(name="truncated_normal", std=0.02)
    embedding_initializer: InitializerConfig | None = None
    output_layer_initializer: InitializerConfig | None = None

    loss_scaling: Literal["num_tokens", "batch_size"] = "num_tokens"
    loss_weight: float = Field(default=1.0, gt=0)

    mup_base_hidden_size: int | None = Field(default=None, ge=1)
    mup_base_filter_size: int | None = Field(default=None, ge=1)
    scale_qk_dot_by_d: bool = False
    output_logits_alpha: float | None = Field(default=None, gt=0)
    embeddings_scale: float = 1.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_heads ({self.num_heads})"
            )
        return self

    @model_validator(mode="after")
    def _mup_needs_both_widths(self) -> Self:
        if (self.mup_base_hidden_size is None) != (self.mup_base_filter_size is None):
            raise ValueError("mup_base_hidden_size and mup_base_filter_size come together or not at all")
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Width between the two layers of the feed-forward part."""
        return 4 * self.hidden_size if self.filter_size is None else self.filter_size

    @property
    def embedding_dropout(self) -> float:
        return self.dropout_rate if self.embedding_dropout_rate is None else self.embedding_dropout_rate

    @property
    def attention_dropout(self) -> float:
        return self.dropout_rate if self.attention_dropout_rate is None else self.attention_dropout_rate

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        if self.attention_type == "dot_product":
            return 1.0
        return 1 / self.head_size if self.scale_qk_dot_by_d else 1 / math.sqrt(self.head_size)

    @property
    def width_ratio(self) -> float:
        """`hidden_size` relative to the muP base; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def filter_ratio(self) -> float:
        """`ffn_size` relative to the muP base; 1 without muP."""
        return self.ffn_size / (self.mup_base_filter_size or self.ffn_size)

    @property
    def output_logits_scale(self) -> float:
        """Factor on the logits: 1 without muP."""
        if self.mup_base_hidden_size is None:
            return 1.0
        return (self.output_logits_alpha or 1.0) / self.width_ratio

    @property
    def embedding_init(self) -> InitializerConfig:
        """Of token and position embeddings."""
        return self.embedding_initializer or self.initializer

    @property
    def input_init(self) -> InitializerConfig:
        """Of the matrices that read the residual stream: query, key, value, first feed-forward layer."""
        return self.initializer.scaled(self.width_ratio**-0.5)

    @property
    def attention_output_init(self) -> InitializerConfig:
        """Of the attention's output projection."""
        return self._residual_init(self.width_ratio)

    @property
    def ffn_output_init(self) -> InitializerConfig:
        """Of the second layer of the feed-forward part."""
        return self._residual_init(self.filter_ratio)

    def _residual_init(self, ratio: float) -> InitializerConfig:
        # muP files give the output initializer without the depth factor, other files with it.
        given, mup = self.output_layer_initializer, self.mup_base_hidden_size is not None
        depth_factor = (2 * self.num_hidden_layers) ** -0.5 if mup or given is None else 1.0
        return (given or self.initializer).scaled(depth_factor * ratio**-0.5)


MODELS: dict[str, type[GPTConfig]] = {"gpt2": GPTConfig, "gpt3": GPTConfig}
"""Schema of the `model:` section by the model's name. A family is added by a class and a line here."""

ModelConfig = GPTConfig
"""Any model section; a union once there are several families."""
