"""Names of the linear layers of decoders in the transformers library, by family."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.config.models.decoder import DecoderConfig


_Layers = tuple[str, dict[str, tuple[str, ...]]]
"""Prefix of the names of blocks; and for each linear layer of our block, the library's layers in it."""

_SPLIT = ("q_proj", "k_proj", "v_proj")


def _layers(block: str, qkv: Sequence[str], output: str, *feed_forward: str) -> _Layers:
    """Return our linear layer -> names of the layers in the transformers library, for one family.

    Args:
        block: prefix of the names of blocks.
        qkv: the projections of queries, keys and values, or one layer that has all three.
        output: the output projection of the attention.
        feed_forward: gate (if there is one), input and output of the feed-forward layer; empty for a mixture
            of experts, because the library's experts are not linear layers.
    """
    ours = ("ffn.gate", "ffn.input", "ffn.output")[-len(feed_forward) :] if feed_forward else ()
    return block, {
        "attention.qkv": tuple(qkv),
        "attention.output": (output,),
        **{name: (theirs,) for name, theirs in zip(ours, feed_forward, strict=True)},
    }


_LLAMA = _layers(
    "model.layers",
    [f"self_attn.{name}" for name in _SPLIT],
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_GPT2 = _layers("transformer.h", ["attn.c_attn"], "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_FALCON = _layers(
    "transformer.h",
    ["self_attention.query_key_value"],
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)
_JAIS = _layers(  # c_fc2 is the gate: the nonlinearity is applied to its output
    "transformer.h", ["attn.c_attn"], "attn.c_proj", "mlp.c_fc2", "mlp.c_fc", "mlp.c_proj"
)

LIBRARY_LAYERS: dict[str, _Layers] = {
    "gpt2": _GPT2,
    "gpt3": _GPT2,
    "santacoder": _GPT2,
    "starcoder": _GPT2,
    "gptj": _layers(
        "transformer.h", [f"attn.{name}" for name in _SPLIT], "attn.out_proj", "mlp.fc_in", "mlp.fc_out"
    ),
    "codegen": _layers("transformer.h", ["attn.qkv_proj"], "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    "gpt-neox": _layers(
        "gpt_neox.layers",
        ["attention.query_key_value"],
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma2": _LLAMA,
    "mixtral": _layers("model.layers", [f"self_attn.{name}" for name in _SPLIT], "self_attn.o_proj"),
    "falcon": _FALCON,
    "bloom": _FALCON,
    "mpt": _layers("transformer.blocks", ["attn.Wqkv"], "attn.out_proj", "ffn.up_proj", "ffn.down_proj"),
    "btlm": _JAIS,
    "jais": _JAIS,
}
"""Names of each family's layers in the library. Our layer stacks those in a tuple, in this order."""


def library_parts(name: str, config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    """Return the transformers library's names of the matrices that are stacked in one of our linear layers.

    Args:
        name: name of the layer's weight.
        config: the model section of a params file.

    Returns:
        Each name with its rows (-1: all); empty if the library's class has no such linear layer.
    """
    block, layers = LIBRARY_LAYERS[config.name]
    found = re.fullmatch(r"blocks\.(\d+)\.(.*)\.weight", name)
    if found is None:
        return (("lm_head.weight", -1),) if name == "head.weight" else ()
    theirs = [f"{block}.{found[1]}.{layer}.weight" for layer in layers.get(found[2], ()) if layer]
    if len(theirs) < 2:
        return tuple((layer, -1) for layer in theirs)
    inner, kv = config.inner_size, config.num_kv_heads * config.head_size
    return tuple(zip(theirs, (inner, kv, kv), strict=True))
