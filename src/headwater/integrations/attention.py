"""Headwater's attention in models of the transformers library."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwater.core.attention import kernel_attention
from headwater.core.errors import ConfigError
from headwater.core.modes import autocast_dtype, cast
from headwater.models.library_attention import unknown_tensors

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "transformers":
        raise
    raise ConfigError("the attention needs transformers", remedy="pip install 'headwater[hf]'") from error

_NAME = "headwater"
_WHERE = "use_fast_attention"


def use_fast_attention(model: nn.Module) -> None:
    """Make models of the transformers library compute attention with Headwater's kernel.

    The kernel (see `headwater.core.attention`) is for bf16 on CPUs with AVX-512 and without AMX. It rounds
    differently from torch's, so the last bits of the results change. It computes attention without dropout,
    in which queries see all keys or those up to their own, except padding after the text. All other
    attention, also on other machines, is computed as with `attn_implementation="sdpa"`.

    Args:
        model: changed in place: its modules that are models of the library. Call this before
            `headwater.compile`.

    Raises:
        ConfigError: if no module is a model of the library, or if one does not support such a replacement.
    """
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise ConfigError(
            f"expected a model of transformers, got {type(model).__name__}, which contains none",
            where=_WHERE,
            remedy="leave this call out, or pass the model that transformers has built",
        )
    for module in found:
        if not (module._supports_attention_backend and module._supports_sdpa):
            raise ConfigError(
                f"transformers cannot replace the attention of {type(module).__name__}",
                where=_WHERE,
                remedy="leave this call out",
            )
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    for module in found:
        module.set_attn_implementation(_NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output of the attention, [batch, queries, heads, head size], and no attention weights.

    Arguments are those of the library: query [batch, heads, queries, head size], key and value
    [batch, heads or fewer, keys, head size].

    Raises:
        ConfigError: if the attention uses a tensor that neither this kernel nor the library's `sdpa` knows.
    """
    unknown = unknown_tensors(others, {"position_bias"})
    if unknown:
        raise ConfigError(
            f"the attention of {type(module).__name__} uses {unknown[0]}, which this kernel does not support",
            where=_WHERE,
            remedy="leave use_fast_attention out",
        )
    lengths_agree = query.shape[2] == key.shape[2]
    asks_for_more = any(others.get(name) is not None for name in ("position_bias", "softcap"))
    if dropout == 0 and lengths_agree and not asks_for_more:
        # Rotations of queries and keys return fp32, which autocast casts for torch's attention.
        autocast = autocast_dtype(query.device.type)
        tensors = (cast(each, autocast) for each in (query, key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and attention_mask is None and query.shape[2] > 1
        output = kernel_attention(*tensors, causal=causal, mask=attention_mask, scale=scaling)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **others,
    )
    return result
