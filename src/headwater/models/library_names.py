"""Names of the linear layers of decoders in the transformers library, by family."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwater.config.models import DecoderConfig

_Layers = tuple[str, dict[str, tuple[str, ...]]]
"""What the names of a block begin with, and for each linear layer of our block the layers that hold it."""

_SPLIT = ("q_proj", "k_proj", "v_proj")


def _layers(block: str, qkv: Sequence[str], output: str, *feed_forward: str) -> _Layers:
    """The layers of a family; `feed_forward` is input and output, with the gate before them if there is one.

    Experts are not linear layers: of a mixture of experts the feed-forward part is left out.
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
_JAIS = _layers(  # c_fc2 goes through the nonlinearity
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
"""The layers of each family. Where several hold one of ours, they are stacked in it in this order."""


def library_parts(name: str, config: DecoderConfig) -> tuple[tuple[str, int], ...]:
    """Return what the transformers library calls the matrices in a linear layer of ours.

    Args:
        name: the name of the layer's weight.
        config: the model.

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
