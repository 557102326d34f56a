"""Parameters of encoder-decoders: initial values, and factors on the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.config.models.common import InitializerConfig
from headwater.config.models.seq2seq import Seq2SeqConfig, StackName
from headwater.models.layers.initializers import BIASES_AND_NORMS, draw, first_match


@dataclasses.dataclass(frozen=True)
class Initializers:
    """The initializers of the matrices of the encoder or the decoder.

    Attributes:
        embedding: that of the token embeddings, and of a head that does not share their weights.
        query: that of the queries.
        key_value: that of keys and values, and of the table of relative positions.
        ffn_input: that of the first layer of the feed-forward part.
        attention_output: that of the attention's output projection.
        ffn_output: that of the second layer of the feed-forward part.
    """

    embedding: InitializerConfig
    query: InitializerConfig
    key_value: InitializerConfig
    ffn_input: InitializerConfig
    attention_output: InitializerConfig
    ffn_output: InitializerConfig


def initializers(config: Seq2SeqConfig, stack: StackName) -> Initializers:
    """Return the initializers of a stack: those of the first transformer, of T5, or of T5 with muP."""
    if config.use_transformer_initialization:
        attention = InitializerConfig(name="xavier_uniform", gain=1 / 3)
        ffn = InitializerConfig(name="xavier_uniform")
        return Initializers(
            embedding=InitializerConfig(name="truncated_normal", std=1.0),
            query=attention.scaled(config.d_kv**-0.5),
            key_value=attention,
            ffn_input=ffn,
            attention_output=attention,
            ffn_output=ffn,
        )

    def normal(std: float) -> InitializerConfig:
        return InitializerConfig(name="normal", std=std * config.initializer_factor)

    matrix = normal(config.d_model**-0.5)
    depth = (2 * config.num_layers(stack)) ** -0.5 if config.is_mup else 1.0
    heads_are_constant = config.is_mup and config.mup_base_d_kv is None
    inputs = config.d_model if heads_are_constant else config.inner_size
    return Initializers(
        embedding=normal(config.d_model**-0.5 if config.is_mup else 1.0),
        query=matrix.scaled(config.d_kv**-0.5),
        key_value=matrix,
        ffn_input=matrix,
        attention_output=normal(inputs**-0.5 * depth),
        ffn_output=normal(config.d_ff**-0.5 * depth),
    )


def init_parameter(name: str, shape: Sequence[int], config: Seq2SeqConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone."""
    if name.endswith("attention.qkv.weight"):
        # Queries may have another initializer than keys and values, so that the two parts are drawn
        # separately.
        inner, matrices = config.inner_size, initializers(config, _stack(name))
        query = draw(f"{name}/query", (inner, shape[1]), matrices.query, seed)
        key_value = draw(
            f"{name}/key_value", (2 * inner, shape[1]), matrices.key_value, seed, rows=(inner,) * 2
        )
        return torch.cat((query, key_value))
    rows = (config.inner_size,) * 2 if name.endswith("key_value.weight") else ()
    return draw(name, shape, _initializer(name, config), seed, rows=rows)


def _stack(name: str) -> StackName:
    return "decoder" if name.startswith("decoder.") else "encoder"


def _initializer(name: str, config: Seq2SeqConfig) -> InitializerConfig:
    matrices = initializers(config, _stack(name))
    block = r"(encoder|decoder)\.blocks\.\d+\."
    found = first_match(
        name,
        (
            *BIASES_AND_NORMS,
            (r"((target_)?embedding|head|(encoder|decoder)\.position_embedding)\.weight", matrices.embedding),
            (r"(encoder|decoder)\.relative_bias\.weight", matrices.key_value),
            (rf"{block}cross_attention\.query\.weight", matrices.query),
            (rf"{block}cross_attention\.key_value\.weight", matrices.key_value),
            (rf"{block}(cross_)?attention\.output\.weight", matrices.attention_output),
            (rf"{block}ffn\.(input|gate)\.weight", matrices.ffn_input),
            (rf"{block}ffn\.output\.weight", matrices.ffn_output),
        ),
    )
    assert found is not None, f"no initializer for parameter {name}"
    return found


def learning_rate_scale(name: str, config: Seq2SeqConfig) -> float:
    """Return the factor on the learning rate of parameter `name`; 1 without muP.

    Under Adam, the learning rate of a matrix is divided by the growth of its input width (arXiv:2203.03466,
    table 8). It is divided by the square root of the growth if only one side of the matrix grows with the
    model: embeddings, and attention with heads of constant size.
    """
    if not config.is_mup:
        return 1.0
    heads_grow = config.mup_base_d_kv is not None
    root = config.width_ratio**-0.5
    scale = first_match(
        name,
        (
            (r"((target_)?embedding|head)\.weight", root),
            (r".*attention\.(qkv|query|key_value)\.weight", 1 / config.width_ratio if heads_grow else root),
            (r".*attention\.output\.weight", 1 / config.head_ratio if heads_grow else root),
            (r".*ffn\.(input|gate)\.weight", 1 / config.width_ratio),
            (r".*ffn\.output\.weight", 1 / config.filter_ratio),
        ),
    )
    return 1.0 if scale is None else scale
