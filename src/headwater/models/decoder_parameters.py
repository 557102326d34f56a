"""Parameters of decoders: initial values, factors on the learning rate, and names in other libraries."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from headwater.config.models.common import InitializerConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.core.stage import MAY_BE_MISSING
from headwater.models.layers.initializers import draw, first_match
from headwater.models.layers.positions import alibi_slopes
from headwater.models.library_names import library_parts
from headwater.models.lora import init_adapter, is_adapter


@dataclasses.dataclass(frozen=True)
class Initializers:
    """The initializers of a decoder's matrices.

    Attributes:
        embedding: that of token and position embeddings.
        reading: that of the matrices that read the residual stream: query, key, value, first FFN layer.
        attention_output: that of the attention's output projection.
        ffn_output: that of the second layer of the feed-forward part.
        head: that of a head that does not share the embedding's weights.
    """

    embedding: InitializerConfig
    reading: InitializerConfig
    attention_output: InitializerConfig
    ffn_output: InitializerConfig
    head: InitializerConfig


def initializers(config: DecoderConfig) -> Initializers:
    """Return the initializers of the matrices, with the factors of muP (arXiv:2304.03208, appendix G)."""
    matrix, given = config.matrix_init, config.output_layer_initializer
    output = given or matrix
    # In files with muP the output initializer does not include the depth factor, in others it does.
    without_depth = given is None or config.mup_base_hidden_size is not None
    depth = (2 * config.num_hidden_layers) ** -0.5 if without_depth else 1.0
    return Initializers(
        embedding=config.embedding_initializer or matrix,
        reading=matrix.scaled(config.width_ratio**-0.5),
        attention_output=output.scaled(depth * config.width_ratio**-0.5),
        ffn_output=output.scaled(depth * config.filter_ratio**-0.5),
        head=matrix,
    )


def init_parameter(name: str, shape: Sequence[int], config: DecoderConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU.

    It depends only on the arguments, so that a model can be initialised one stage at a time.

    Args:
        name: qualified name of the parameter.
        shape: shape of the parameter.
        config: the model section of a params file.
        seed: seed of the run.
    """
    if name == "alibi.slopes":
        return alibi_slopes(config.num_heads)
    if is_adapter(name):
        return init_adapter(name, shape, seed)
    return draw(name, shape, _initializer(name, config), seed, rows=_stacked_rows(name, shape, config))


def _stacked_rows(name: str, shape: Sequence[int], config: DecoderConfig) -> tuple[int, ...]:
    """Return the rows of each matrix that is stacked in parameter `name`; empty if nothing is stacked."""
    if ".qkv." in name:
        kv_size = config.num_kv_heads * config.head_size
        return (config.inner_size, kv_size, kv_size)
    if config.moe is not None and re.search(r"\.ffn\.(input|gate|output)\.", name):
        return (shape[0] // config.moe.num_experts,) * config.moe.num_experts
    return ()


_READING = r"(attention\.qkv|ffn\.(shared\.)?(input|gate)|ffn\.router)"
"""Pattern of the matrices of a block that read the residual stream."""


def _initializer(name: str, config: DecoderConfig) -> InitializerConfig:
    matrices = initializers(config)
    found = first_match(
        name,
        (
            (r".*\bbias", InitializerConfig(name="zeros")),
            (r".*norm\.weight", InitializerConfig(name="zeros" if config.norm_unit_offset else "ones")),
            (r"(position_)?embedding\.weight", matrices.embedding),
            (rf"blocks\.\d+\.{_READING}\.weight", matrices.reading),
            (r"blocks\.\d+\.attention\.output\.weight", matrices.attention_output),
            (r"blocks\.\d+\.ffn\.(shared\.)?output\.weight", matrices.ffn_output),
            (r"head\.weight", matrices.head),
        ),
    )
    assert found is not None, f"no initializer for parameter {name}"
    return found


def learning_rate_scale(name: str, config: DecoderConfig) -> float:
    """Return the factor on the learning rate of parameter `name`; 1 without muP.

    Under Adam, the learning rate of a matrix is divided by the growth of its input width (arXiv:2203.03466,
    table 8).
    """
    scale = first_match(
        name,
        (
            (rf"blocks\.\d+\.({_READING}|attention\.output)\.weight", 1 / config.width_ratio),
            (r"blocks\.\d+\.ffn\.(shared\.)?output\.weight", 1 / config.filter_ratio),
        ),
    )
    return 1.0 if scale is None else scale


def pretrained_names(name: str) -> tuple[str, ...]:
    """Return the names that a parameter may have in a checkpoint; for an adapter, then `MAY_BE_MISSING`."""
    return (name, MAY_BE_MISSING) if is_adapter(name) else (name,)


def layer_namings(name: str, config: DecoderConfig) -> tuple[Sequence[tuple[str, int]], ...]:
    """Return the names of the matrices that are stacked in a linear layer's weight, each with its rows.

    Returns:
        Two lists: the Model Zoo's names (see `public_parts`), and those of the transformers library (see
        `library_parts`).
    """
    return public_parts(name, config), library_parts(name, config)


def public_parts(name: str, config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    """Return the Model Zoo's names of the parameters stacked in ours, each with its number of rows (-1: all).

    Patterns of names in params files use these names, and so do checkpoints of the Model Zoo. The result is
    empty for the output of several shared experts, whose matrices are side by side in ours.
    """
    block = re.match(r"blocks\.(\d+)\.(.*)", name)
    if block is None:
        return ((_renamed(name, _PUBLIC_NAMES), -1),)
    layer, below = f"transformer_decoder.layers.{block[1]}", block[2]
    kind = below.rpartition(".")[2]
    if below.startswith("attention.qkv."):
        kv = config.num_kv_heads * config.head_size
        projections = zip("qkv", (config.inner_size, kv, kv), strict=True)
        return tuple(
            (f"{layer}.self_attn.proj_{which}_dense_layer.{kind}", rows) for which, rows in projections
        )
    moe = config.moe
    if moe is not None and below.startswith("ffn.shared."):
        if below.startswith("ffn.shared.output.") and moe.num_shared_experts > 1:
            return ()
        theirs = _renamed(below.removeprefix("ffn.shared."), _PUBLIC_FFN_NAMES)
        rows = config.ffn_size if moe.num_shared_experts > 1 else -1
        experts = f"{layer}.ffn.experts.shared_experts"
        return tuple((f"{experts}.{expert}.ffn.{theirs}", rows) for expert in range(moe.num_shared_experts))
    if moe is not None and below.startswith(("ffn.input.", "ffn.gate.", "ffn.output.")):
        theirs = _renamed(below.removeprefix("ffn."), _PUBLIC_FFN_NAMES)
        rows = config.hidden_size if below.startswith("ffn.output.") else config.ffn_size
        experts = f"{layer}.ffn.experts.experts"
        return tuple((f"{experts}.{expert}.{theirs}", rows) for expert in range(moe.num_experts))
    if below.startswith("ffn.") and not below.startswith("ffn.router."):
        return ((f"{layer}.ffn.ffn.{_renamed(below.removeprefix('ffn.'), _PUBLIC_FFN_NAMES)}", -1),)
    return ((f"{layer}.{_renamed(below, _PUBLIC_BLOCK_NAMES)}", -1),)


_PUBLIC_NAMES = {
    "embedding": "embedding_layer.word_embeddings",
    "position_embedding": "embedding_layer.position_embeddings.embed",
    "alibi": "embedding_layer.position_embed_helper",
    "embedding_norm": "embedding_ln_f",
    "norm": "transformer_decoder.norm",
    "head": "lm_head",
}
_PUBLIC_BLOCK_NAMES = {
    "attention_norm": "norm1",
    "attention.output": "self_attn.proj_output_dense_layer",
    "attention_post_norm": "norm1_post",
    "ffn_norm": "norm3",
    "ffn.router": "ffn.gate",
    "ffn_post_norm": "norm3_post",
}
_PUBLIC_FFN_NAMES = {"input": "0.linear_layer", "gate": "0.linear_layer_for_glu", "output": "1.linear_layer"}
"""The Model Zoo's names of our modules: of a decoder, of a block, and of a feed-forward layer."""


def _renamed(parameter: str, modules: Mapping[str, str]) -> str:
    """Return the name of a parameter with another name of its module. Adapters keep their own names."""
    module, _, kind = parameter.rpartition(".")
    return f"{modules[module]}.{kind}"
